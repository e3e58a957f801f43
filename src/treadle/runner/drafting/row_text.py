"""The part of a row's text that a draft model computes, at the positions that the served model has it at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..forward.positions import Numbers
from ..forward.token_view import TokenView
from .drafter import DraftedRow


class RowText(TokenView):
    """View of a row's `tokens`, of whose first `prompt` ones those at `places` alone; more may be appended to them
    meanwhile. `positions` are those of the tokens at these places, and others follow them."""

    __slots__ = ("_places", "_prompt", "_tokens", "positions")

    def __init__(self, tokens: Sequence[int], prompt: int, places: Numbers, positions: Numbers) -> None:
        self._tokens = tokens
        self._prompt = prompt
        self._places: list[int] = places.tolist()
        self.positions = positions

    def __len__(self) -> int:
        return len(self._tokens) - self._left_out

    def part(self, start: int, stop: int) -> list[int]:
        kept = len(self._places)
        found = [self._tokens[place] for place in self._places[start:stop]]
        found += self._tokens[max(start, kept) + self._left_out : max(stop, kept) + self._left_out]
        return found

    @property
    def _left_out(self) -> int:
        return self._prompt - len(self._places)

    @property
    def lead(self) -> int:
        """The first tokens that are all there, at their places, as in other rows that begin with them."""
        own = np.arange(len(self._places))
        moved = np.flatnonzero((np.array(self._places) != own) | (self.positions != own))
        return int(moved[0]) if len(moved) else len(own)

    @property
    def ahead(self) -> int:
        """Positions of tokens behind the prompt over their indices."""
        return int(self.positions[-1]) + 1 - len(self.positions) if len(self.positions) else 0


def text_of(row: DraftedRow) -> RowText | None:
    """Return what the served model has computed of a row's prompt, without images, which no draft model sees; None
    where that is all of it."""
    length = len(row.request.prompt)
    if row.skipped:
        places = row.positions.of(0, length - row.skipped)
        return RowText(row.tokens, length, places, places)
    if not row.request.images:
        return None
    is_text = np.ones(length, bool)
    for image in row.request.images:
        is_text[image.start : image.end] = False
    places = np.flatnonzero(is_text).astype(np.int32)
    positions = places if row.positions is None else row.positions.of(0, length)[places]
    return RowText(row.tokens, length, places, positions.max(axis=1) if positions.ndim > 1 else positions)
