"""Prompt of a request for display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Echo:
    """One prompt for display: `text`, and the offsets in it of each of `tokens`, if it is scored."""

    text: str
    tokens: Sequence[int] = ()
    offsets: Sequence[int] = ()
