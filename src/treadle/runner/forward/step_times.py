"""The seconds of a step split between prompts and decoding, where one pass computes both."""

from __future__ import annotations

from collections.abc import Sequence

from .segments import RowSegment

_FORGET = 0.7
_FASTER = 0.8  # of the past: a shorter step was delayed by nothing
_SLOWER = 1.5  # of the past, the most that one step counts as: more may be chance
_DISPROVED = 3  # steps in a row that were shorter with prompts than the past without


class StepTimes:
    """Splits steps' seconds. Decoding sequences beside prompts are taken to cost what they lately did without; before
    that is known, or where it is disproved, their share of the tokens.

    Where the next step is prepared while one is computed, its prompts may delay a step of decoding sequences. Such a
    step counts once another step without prompts has followed, or if it was not longer than the past.
    """

    def __init__(self) -> None:
        self._alone_s = 0.0
        self._last_s = 0.0  # of a step of decoding rows, before it counts
        self._disproved = 0

    def split(self, pieces: Sequence[RowSegment], seconds: float) -> dict[str, float]:
        """`prefill_s` and `decode_s` of a step that computed `pieces` in `seconds`."""
        decoding = len([piece for piece in pieces if piece.picks and len(piece.tokens) == 1])
        with_prompts = decoding < len(pieces)
        self._count(with_prompts)
        if with_prompts:
            decode_s = self._beside(decoding, sum(len(piece.tokens) for piece in pieces), seconds)
            return {"prefill_s": seconds - decode_s, "decode_s": decode_s}
        self._last_s = seconds if decoding else 0.0
        return {"prefill_s": 0.0, "decode_s": self._last_s}

    def _count(self, with_prompts: bool) -> None:
        past, last, self._last_s = self._alone_s, self._last_s, 0.0
        held_up = with_prompts and 0 < _FASTER * past < last
        if last and not held_up:
            self._alone_s = _FORGET * past + (1 - _FORGET) * min(last, _SLOWER * past) if past else last

    def _beside(self, decoding: int, tokens: int, seconds: float) -> float:
        if not decoding:
            return 0.0
        self._disproved = self._disproved + 1 if seconds <= self._alone_s else 0
        if self._disproved == _DISPROVED:  # decoding has become cheaper
            self._alone_s, self._disproved = 0.0, 0
        return min(seconds, self._alone_s) if self._alone_s else seconds * decoding / tokens
