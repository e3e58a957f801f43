"""Incremental detokenizer: token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .text_view import TextView


class Detokenizer:
    """Incremental detokenizer of one sequence.

    The joined text does not depend on how ids are split over `push` calls. A code point is never split: it is returned
    with the token that completes it. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, text_model: TextView, *, skip_special_tokens: bool = True) -> None:
        self._hidden = text_model.special_ids if skip_special_tokens else frozenset()
        self._stream = text_model.token_decoder.stream()

    @property
    def pending(self) -> bool:
        """Whether the bytes of an incomplete code point are held back."""
        return self._stream.pending

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete; may be empty."""
        if not self._hidden.isdisjoint(ids):
            ids = [token for token in ids if token not in self._hidden]
        return self._stream.push(ids)

    def finish(self) -> str:
        """Return the rest of the text at the end of the sequence; incomplete bytes become U+FFFD."""
        return self._stream.finish()
