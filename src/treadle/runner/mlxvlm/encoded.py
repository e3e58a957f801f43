"""Results of vision towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Grid = Sequence[Sequence[int]]


class Encoded(NamedTuple):
    """Features `rows` (m, D) of an image, one for each of its placeholders, and what is added to them behind the first
    layers of the language model, (m, D) each, known `after` so many layers of the tower."""

    rows: Any
    deepstack: tuple[Any, ...] = ()
    after: tuple[int, ...] = ()
