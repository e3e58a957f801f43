"""Results of vision towers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

Grid = Sequence[Sequence[int]]


class Encoded(NamedTuple):
    """Features `rows` (m, D) of an image, one for each of its placeholders, and what is added to them behind the first
    layers of the language model, (m, D) each."""

    rows: Any
    deepstack: tuple[Any, ...] = ()


Walk = Generator[Sequence[Any], None, Any]
"""Layers of a tower in turn: yields the hidden states behind each, and features of `deepstack` that are known then.
Returns the features `rows`."""
