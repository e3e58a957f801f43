"""Finishes of sequences, as clients get them."""

from __future__ import annotations

from ..errors import beyond_context
from .messages import CancelReason, Finish, FinishReason
from .sequence import Sequence


def cancelled(reason: CancelReason) -> Finish:
    """Return the finish of a cancelled sequence. A stop string is a good end."""
    if reason is CancelReason.STOP:
        return Finish(reason=FinishReason.STOP)
    return Finish(reason=FinishReason.CANCELLED, code=reason.value)


def failed(code: str, message: str) -> Finish:
    """Return the finish of a failed sequence."""
    return Finish(reason=FinishReason.ERROR, code=code, message=message)


def too_big(seq: Sequence, capacity: int) -> Finish:
    """Return the finish of a sequence that would not fit into `capacity` tokens of cache even alone."""
    return failed("context_length_exceeded", over_capacity(seq.max_num_tokens, capacity))


def over_capacity(tokens: int, capacity: int) -> str:
    """Return the message for sequences that may come to more `tokens` than the cache holds."""
    return beyond_context(
        capacity,
        f"you requested {tokens} tokens in all. Please reduce the length of the messages or completion, or raise the "
        f"server's --memory: it holds {capacity} tokens.",
    )
