"""How much of a step went to prompts and how much to decoding, where one pass computes both."""

from __future__ import annotations

from collections.abc import Sequence

from .flat import Piece

_FORGET = 0.7


class StepTimes:
    """Splits steps' seconds. In a pass with prompts beside them, decoding rows are taken to cost what they lately did
    without; before that is known, what their share of the tokens comes to."""

    def __init__(self) -> None:
        self._alone_s = 0.0

    def split(self, pieces: Sequence[Piece], seconds: float) -> dict[str, float]:
        """`prefill_s` and `decode_s` of a step that computed `pieces` in `seconds`."""
        decoding = sum(piece.picks and len(piece.tokens) == 1 for piece in pieces)
        if decoding < len(pieces):
            decode_s = self._beside(decoding, sum(len(piece.tokens) for piece in pieces), seconds)
            return {"prefill_s": seconds - decode_s, "decode_s": decode_s}
        if decoding:
            past = self._alone_s or seconds
            self._alone_s = _FORGET * past + (1 - _FORGET) * seconds
        return {"prefill_s": 0.0, "decode_s": seconds if decoding else 0.0}

    def _beside(self, decoding: int, tokens: int, seconds: float) -> float:
        if not decoding:
            return 0.0
        return min(seconds, self._alone_s) if self._alone_s else seconds * decoding / tokens
