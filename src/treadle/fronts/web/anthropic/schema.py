"""Shapes of the requests: fields, their types, and their descriptions in the OpenAPI document.

Types are strict, and unknown fields are accepted: Anthropic's clients send new ones with each beta, to any server.
`reports` logs them. Messages, system texts, tools and options are read by the modules beside this one.
"""

from __future__ import annotations

import itertools
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ...validate import MAX_TOKENS
from ..fields import StopStrings, TopK, TopP, Whole, optional, size, span
from ..json_schemas import or_null, ref, typed

MAX_REPORTED = 32
MAX_REPORTED_CHARS = 64

MaxTokens = Annotated[Whole, span(0, MAX_TOKENS)]
Temperature = Annotated[float, span(0, 1)]


UNUSED = (
    *("cache_control", "metadata", "service_tier", "context_management", "betas", "anthropic_beta"),
    *("anthropic_version", "speed", "inference_geo", "diagnostics", "user_profile_id", "workspace_id"),
    *("billing_policy", "fallbacks", "fallback_credit_token"),
)
"""Fields that change nothing about an answer here, and may hold any value."""


class Conversation(BaseModel):
    """Fields of a request whose prompt is counted, or answered."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())

    messages: typed({"type": "array", "items": ref("AnthropicMessage"), "minItems": 1}) = Field(  # type: ignore[valid-type]
        description="The conversation, oldest message first. An assistant's message at the end is continued."
    )
    model: Annotated[str, size(minLength=1)] | None = optional(
        "The served model's name, an alias, or any name that begins with `claude-`."
    )
    system: typed(or_null({"type": "string"}, {"type": "array", "items": ref("AnthropicTextBlock")})) = optional(  # type: ignore[valid-type]
        "The system prompt: a string, or blocks of text."
    )
    tools: typed(or_null({"type": "array", "items": ref("AnthropicTool")})) = optional(  # type: ignore[valid-type]
        "Tools that the model may call."
    )
    tool_choice: typed(or_null(ref("AnthropicToolChoice"))) = optional(  # type: ignore[valid-type]
        "auto (the default), any, tool, or none. All but auto are enforced."
    )
    thinking: typed(or_null(ref("AnthropicThinking"))) = optional(  # type: ignore[valid-type]
        "Reasoning: enabled, adaptive or disabled (the default)."
    )
    output_config: typed(or_null(ref("AnthropicOutputConfig"))) = optional(  # type: ignore[valid-type]
        "`format`: JSON of a schema, which is enforced; `effort` is handed to the model's template."
    )
    output_format: typed(or_null(ref("AnthropicFormat"))) = optional("The older name of `output_config.format`.")  # type: ignore[valid-type]
    mcp_servers: typed(or_null({"type": "array", "maxItems": 0})) = optional(  # type: ignore[valid-type]
        "Not served: only null or empty."
    )
    container: typed({"type": "null"}) = optional("Not served: only null.")  # type: ignore[valid-type]
    thread: typed({"type": "null"}) = optional("Not served: only null.")  # type: ignore[valid-type]
    compaction: typed({"type": "null"}) = optional("Not served: only null.")  # type: ignore[valid-type]


class Messages(Conversation):
    """Body of a request to answer a conversation in Anthropic's dialect. Unknown fields are ignored, and logged."""

    max_tokens: MaxTokens = Field(
        description="The most tokens to generate; never more than the context and the server's cap leave. 0 computes "
        "the prompt alone."
    )
    stream: bool | None = optional("Answer with server-sent events while the answer is generated.")
    stop_sequences: StopStrings | None = optional("Up to 16 strings that end the answer; they are not shown.")
    temperature: Temperature | None = optional("0 (greedy) to 1. Default: the model's, else 1.")
    top_p: TopP | None = optional("Sample from the likeliest tokens of this total probability.")
    top_k: TopK | None = optional("Sample from the likeliest k tokens; 0 or -1 is off.")
    speculate: bool | None = optional("False drafts no tokens for this answer, which is the same with and without.")
    spec_prefill: bool | None = optional(
        "False prefills the whole prompt, where the server has SpecPrefill; true needs that. See `--spec-prefill`."
    )


def unknown_fields(body: Conversation) -> tuple[str, ...]:
    """Return the names of fields that this server does not know, at most MAX_REPORTED and cut."""
    names = (name[:MAX_REPORTED_CHARS] for name in body.model_extra or {} if name not in UNUSED)
    return tuple(itertools.islice(names, MAX_REPORTED))
