"""Token ids to text, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .view import TextView


class Detokenizer:
    """Incremental text of one sequence.

    However the ids are split over `push` calls, the joined text is the same. A code point is never split: its text
    comes with the token that completes it. Bytes that can form none become U+FFFD.
    """

    def __init__(self, text_model: TextView, *, skip_special_tokens: bool = True) -> None:
        self._hidden = text_model.special_ids if skip_special_tokens else frozenset()
        self._joiner = text_model.pieces.joiner()

    @property
    def pending(self) -> bool:
        """Whether part of a code point is held back."""
        return self._joiner.pending

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete, maybe ''."""
        if not self._hidden.isdisjoint(ids):
            ids = [token for token in ids if token not in self._hidden]
        return self._joiner.push(ids)

    def finish(self) -> str:
        """What is still held at the end of the sequence."""
        return self._joiner.finish()
