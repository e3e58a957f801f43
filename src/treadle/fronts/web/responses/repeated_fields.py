"""Fields of a response that repeat its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ....text.formats.base import AUTO
from ...reasoning_fields import ReasoningOptions
from .options import read_metadata, read_truncation, text_options
from .schema import ResponseFields
from .tools import ALLOWED, Tools


def repeated_fields(body: ResponseFields, tools: Tools, reasoning: ReasoningOptions, summary: str | None) -> bytes:
    """Return the fields as JSON without braces. Raises InvalidRequest for those that are read here."""
    text = text_options(body.text)
    repeated = {
        "background": bool(body.background),
        "conversation": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": read_metadata(body.metadata),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": _effort(reasoning), "summary": summary},
        "safety_identifier": body.safety_identifier,
        "store": body.store is not False,
        "text": {"format": _format(text.get("format")), "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": _choice(body.tool_choice),
        "tools": tools.definitions,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": read_truncation(body.truncation),
        "user": body.user,
    }
    return msgspec.json.encode(repeated)[1:-1]


def _choice(value: Any) -> Any:
    if value is None:
        return AUTO
    return {"mode": AUTO, **value} if isinstance(value, Mapping) and value.get("type") == ALLOWED else value


def _effort(reasoning: ReasoningOptions) -> str | None:
    return "none" if reasoning.enabled is False else reasoning.effort


def _format(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if value is None:
        return {"type": "text"}
    if value.get("type") != "json_schema":
        return value
    return {"name": "", "description": None, "strict": False, **value}
