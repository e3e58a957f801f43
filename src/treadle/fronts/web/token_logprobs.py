"""JSON of a token with its log-probability, as chats, responses and Ollama have it."""

from __future__ import annotations

from typing import Any

from ...text import TextView, TokenEntry

LOWEST_LOGPROB = -9999.0
"""The APIs' value for an impossible token: JSON has no -inf."""


def token_json(entry: TokenEntry, model: TextView) -> dict[str, Any]:
    """Return one token with its log-probability, its bytes, and the likeliest tokens in its place."""
    top = [_token(token, logprob, model) for token, logprob in entry.logprob.top]
    return {**_token(entry.token, entry.logprob.logprob, model), "top_logprobs": top}


def _token(token: int, logprob: float, model: TextView) -> dict[str, Any]:
    return {
        "token": model.token_text(token),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(model.token_bytes(token)),
    }
