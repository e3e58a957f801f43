"""JSON of answers: choices, log-probabilities and usage, with little work per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....text import TextView, TokenEntry
from ...generation.pieces import Piece, Usage, WholeChoice
from ..parsed import Head
from ..token_logprobs import LOWEST_LOGPROB, token_json

DONE = b"data: [DONE]\n\n"
_NULL_USAGE = b'],"usage":null}\n\n'

encode = msgspec.json.encode


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return token counts with their sum."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the token counts of a whole request."""
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.accepted_tokens is not None and usage.rejected_tokens is not None:
        details["accepted_prediction_tokens"] = usage.accepted_tokens
        details["rejected_prediction_tokens"] = usage.rejected_tokens
    return {
        **token_counts(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **usage.prompt_details},
        "completion_tokens_details": details,
    }


def head_fields(head: Head, kind: str) -> dict[str, Any]:
    """Return the fields that every chunk and answer of one request repeats."""
    fields = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
    return fields if head.service_tier is None else fields | {"service_tier": head.service_tier}


def stop_reason(part: Piece | WholeChoice) -> dict[str, Any]:
    """Return vLLM's field of a choice, where the request's own timeout ended it."""
    return {"stop_reason": "timeout"} if part.timed_out else {}


class ChunkWriter:
    """Writer of the events of one stream. The parts that never change are encoded once."""

    def __init__(self, head: Head, kind: str, *, with_usage: bool) -> None:
        self._start = b"data: " + encode(head_fields(head, kind))[:-1] + b',"choices":['
        self._end = _NULL_USAGE if with_usage else b"]}\n\n"

    def choice(self, choice: dict[str, Any]) -> bytes:
        return self._start + encode(choice) + self._end

    @staticmethod
    def counted(events: bytes, prompt_tokens: int, completion_tokens: int) -> bytes:
        """Return events of a writer `with_usage` with these counts in place of null. JSON has no line break, so only
        the ends of events match."""
        usage = token_counts(prompt_tokens, completion_tokens)
        return events.replace(_NULL_USAGE, b'],"usage":' + encode(usage) + b"}\n\n")

    def usage(self, usage: Usage) -> bytes:
        return self._start + b'],"usage":' + encode(usage_json(usage)) + b"}\n\n"


def chat_logprobs(entries: Sequence[TokenEntry], model: TextView) -> dict[str, Any]:
    """Return the chat format: one object per token, with its bytes."""
    return {"content": [token_json(entry, model) for entry in entries], "refusal": None}


def legacy_logprobs(entries: Sequence[TokenEntry], model: TextView, *, top: bool, offset: int = 0) -> dict[str, Any]:
    """Return the completions format: four parallel lists; `offset` is the answer's offset in the text."""
    return {
        "tokens": [model.token_text(entry.token) for entry in entries],
        "token_logprobs": [max(entry.logprob.logprob, LOWEST_LOGPROB) for entry in entries],
        "top_logprobs": [_legacy_top(entry, model) for entry in entries] if top else None,
        "text_offset": [offset + entry.text_offset for entry in entries],
    }


def _legacy_top(entry: TokenEntry, model: TextView) -> dict[str, float]:
    """Return the likeliest tokens, best first; the chosen token is always in it."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.logprob.top, (entry.token, entry.logprob.logprob)):
        found.setdefault(model.token_text(token), max(logprob, LOWEST_LOGPROB))
    return found
