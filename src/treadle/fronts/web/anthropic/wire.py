"""JSON of answers: events of a stream, usage, and reasons of an end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ....errors import RequestCancelled
from ....text import TextView
from ...generation.pieces import ABORT, LENGTH, Piece, Usage, WholeChoice
from ..parsed import Head

encode = msgspec.json.encode

END_TURN, MAX_TOKENS, STOP_SEQUENCE, TOOL_USE = "end_turn", "max_tokens", "stop_sequence", "tool_use"
WINDOW_EXCEEDED = "model_context_window_exceeded"


@dataclass(frozen=True)
class AnswerLimits:
    """Limits of one answer, as its request gave them, and the model's context: the ends that it may have.
    `caches`: the request marks parts of its prompt for the cache."""

    max_tokens: int
    stop_sequences: Collection[str] = ()
    context: int | None = None
    caches: bool = False


def event(kind: str, **fields: Any) -> bytes:
    """Return one event of a stream."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields}))


PING = event("ping")


def usage_json(usage: Usage, limits: AnswerLimits, head: Head) -> dict[str, Any]:
    """Return token counts. Tokens of the prompt that were read from the cache, and those written to it at the
    request's wish, are not among `input_tokens`."""
    computed = usage.prompt_tokens - usage.cached_tokens
    created = computed if limits.caches and head.caches_prompts else 0
    return {
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.cached_tokens,
        "server_tool_use": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **({"input_tokens_details": usage.prompt_details} if usage.prompt_details else {}),
    }


def end_of(
    last: Piece | WholeChoice, usage: Usage, limits: AnswerLimits, text: TextView, *, called: bool
) -> Mapping[str, str | None]:
    """Return the reason of an answer's end, and the stop sequence that ended it. Raises RequestCancelled for an answer
    that was cancelled by its id: none of Anthropic's reasons says that, and clients take each as a whole answer."""
    if last.finish_reason == ABORT:
        raise RequestCancelled("the request was cancelled by its id before its answer was complete")
    stop = _stop_sequence(last, limits, text)
    if stop is not None:
        return {"stop_reason": STOP_SEQUENCE, "stop_sequence": stop}
    if last.finish_reason != LENGTH:
        return {"stop_reason": TOOL_USE if called else END_TURN, "stop_sequence": None}
    full = limits.context is not None and usage.prompt_tokens + usage.completion_tokens >= limits.context
    exceeded = full and usage.completion_tokens < limits.max_tokens
    return {"stop_reason": WINDOW_EXCEEDED if exceeded else MAX_TOKENS, "stop_sequence": None}


def _stop_sequence(last: Piece | WholeChoice, limits: AnswerLimits, text: TextView) -> str | None:
    """Return the request's stop sequence that ended the answer, if one did; a special token is one by its text."""
    found = last.stop_string
    if found is None and last.stop_token_id is not None and limits.stop_sequences:
        found = text.token_text(last.stop_token_id)
    return found if found in limits.stop_sequences else None


def message(
    head: Head, content: list[dict[str, Any]], end: Mapping[str, str | None], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a message of the assistant, whole or as a stream begins with it. Members that stand for Anthropic's own
    services are null: clients check that they are there."""
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **end,
        "stop_details": None,
        "container": None,
        "usage": {**usage, "cache_creation": None, "inference_geo": None, "service_tier": "standard"},
    }
