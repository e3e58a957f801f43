"""How sequences end, as what their clients hear."""

from __future__ import annotations

from .messages import CancelReason, Finish, FinishReason
from .sequence import Sequence


def cancelled(reason: CancelReason) -> Finish:
    """Taken back; by a stop string, which is a good end, or for `reason`."""
    if reason is CancelReason.STOP:
        return Finish(reason=FinishReason.STOP)
    return Finish(reason=FinishReason.CANCELLED, code=reason.value)


def failed(code: str, message: str) -> Finish:
    return Finish(reason=FinishReason.ERROR, code=code, message=message)


def too_big(row: Sequence, capacity: int) -> Finish:
    """It would not fit if nothing else ran."""
    needs = f"prompt and completion may come to {row.reserved} tokens, and the cache holds {capacity}"
    return failed("context_length_exceeded", f"{needs}: ask for fewer tokens, or raise the server's --memory")
