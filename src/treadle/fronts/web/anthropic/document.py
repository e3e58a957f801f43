"""JSON schemas of requests, answers and errors for the OpenAPI document, with the limits of the server."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from ...chat_messages import MAX_MESSAGES, MAX_PARTS
from ...tool_fields import MAX_TOOLS, NAME_PATTERN
from ..error_shapes import ANTHROPIC_TYPES
from ..json_schemas import COUNT, FLAG, NULL, REF, STRING, TEXT_OR_NULL, Schema, either, listed, or_null, ref, shape
from .client_tools import VERSIONED
from .options import EFFORTS, TYPES, Display
from .schema import Conversation, Messages
from .tools import MODES
from .turns import ROLES
from .wire import END_TURN, MAX_TOKENS, STOP_SEQUENCE, TOOL_USE, WINDOW_EXCEEDED

OBJECT: Schema = {"type": "object"}
MARK: Schema = {"description": "Accepted: prompts are always cached."}


def _kind(name: str) -> Schema:
    return {"type": "string", "const": name}


def _block(name: str, about: str, needed: Schema, **optional: Schema) -> Schema:
    return shape(about, {"type": _kind(name), **needed}, cache_control=MARK, **optional)


def _one_of(values: Any) -> Schema:
    return {"enum": list(values)}


TEXT_LIKE = ("Text", "Document", "SearchResult")
USER_BLOCKS = (*TEXT_LIKE, "ToolResult")
ASSISTANT_BLOCKS = (*TEXT_LIKE, "Thinking", "RedactedThinking", "ToolUse")


def _blocks(names: tuple[str, ...], **limits: Any) -> Schema:
    items = either(*(ref(f"Anthropic{name}Block") for name in names))
    return either(STRING, listed(items, maxItems=MAX_PARTS, **limits))


PLAIN_TEXTS = listed(ref("AnthropicTextBlock"), minItems=1, maxItems=MAX_PARTS)
SOURCE: Schema = either(
    shape("A text.", {"type": _kind("text"), "data": STRING}),
    shape("Blocks of text.", {"type": _kind("content"), "content": either(STRING, PLAIN_TEXTS)}),
)
CITATIONS = or_null({"type": "object", "properties": {"enabled": {"enum": [None, False]}}})
FORMAT = shape("JSON of a schema.", {"type": _kind("json_schema"), "schema": OBJECT})

BLOCKS: dict[str, Schema] = {
    "AnthropicTextBlock": _block("text", "Text.", {"text": STRING}),
    "AnthropicDocumentBlock": _block(
        "document",
        "A document as text.",
        {"source": SOURCE},
        title=TEXT_OR_NULL,
        context=TEXT_OR_NULL,
        citations=CITATIONS,
    ),
    "AnthropicSearchResultBlock": _block(
        "search_result",
        "A found text, and its source.",
        {"source": STRING, "content": either(STRING, PLAIN_TEXTS)},
        title=TEXT_OR_NULL,
        citations=CITATIONS,
    ),
    "AnthropicToolResultBlock": _block(
        "tool_result",
        "The result of a call.",
        {"tool_use_id": STRING},
        content=or_null(_blocks(TEXT_LIKE)),
        is_error=FLAG,
    ),
    "AnthropicThinkingBlock": _block("thinking", "Earlier reasoning.", {"thinking": STRING}, signature=TEXT_OR_NULL),
    "AnthropicRedactedThinkingBlock": _block("redacted_thinking", "Not used.", {}),
    "AnthropicToolUseBlock": _block(
        "tool_use", "A call.", {"id": STRING, "name": {**STRING, "minLength": 1}}, input=or_null(OBJECT)
    ),
}


def _message(roles: tuple[str, ...], content: Schema, about: str, *needed: str) -> Schema:
    properties = {"role": {"type": "string", "enum": list(roles)}, "content": content}
    return {"type": "object", "description": about, "properties": properties, "required": ["role", *needed]}


MESSAGE: Schema = either(
    _message(("user",), _blocks(USER_BLOCKS, minItems=1), "A turn of the user.", "content"),
    _message(("assistant",), or_null(_blocks(ASSISTANT_BLOCKS)), "A turn of the assistant."),
    _message(
        tuple(role for role in ROLES if role not in ("user", "assistant")),
        either(STRING, PLAIN_TEXTS),
        "Instructions, at any place of the conversation.",
        "content",
    ),
)
CUSTOM_TOOL = shape(
    "A function.",
    {"name": {**STRING, "pattern": f"^{NAME_PATTERN}$"}, "input_schema": OBJECT},
    type={"enum": [None, "custom"]},
    description=TEXT_OR_NULL,
    strict=FLAG,
    input_examples=or_null(listed(OBJECT)),
)
OWN_TOOL = shape(
    "A tool of Anthropic's own that the client runs: shell, text editor, memory.",
    {"type": {**STRING, "pattern": f"^{VERSIONED}$"}},
    name={**STRING, "pattern": f"^{NAME_PATTERN}$"},
    input_schema=or_null(OBJECT),
    strict=FLAG,
    input_examples=or_null(listed(OBJECT)),
)
DISPLAYS: Schema = {"enum": [None, Display.SHOWN.value, Display.OMITTED.value]}
OPTIONS: dict[str, Schema] = {
    "AnthropicMessage": MESSAGE,
    "AnthropicTool": either(CUSTOM_TOOL, OWN_TOOL),
    "AnthropicToolChoice": shape(
        "The choice among the tools; `name` with `tool`.",
        {"type": _one_of(MODES)},
        name=TEXT_OR_NULL,
        disable_parallel_tool_use=FLAG,
    ),
    "AnthropicThinking": shape(
        "Reasoning, its budget, and whether the answer has its text.",
        {"type": _one_of(TYPES)},
        budget_tokens={"type": ["integer", "null"], "minimum": 0, "maximum": 2**31 - 1},
        display=DISPLAYS,
    ),
    "AnthropicFormat": FORMAT,
    "AnthropicOutputConfig": {
        "type": "object",
        "properties": {"format": or_null(ref("AnthropicFormat")), "effort": {"enum": [None, *EFFORTS]}},
    },
}

USAGE = shape(
    "Tokens. The prompt has `input_tokens`, and those read from the cache and written to it.",
    {
        **dict.fromkeys(
            ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"), COUNT
        ),
        "output_tokens_details": shape("Of these.", {"thinking_tokens": COUNT}),
    },
)
REASONS = (END_TURN, MAX_TOKENS, STOP_SEQUENCE, TOOL_USE, WINDOW_EXCEEDED)
ANSWER_BLOCK = either(
    shape("Text.", {"type": _kind("text"), "text": STRING}),
    shape("Reasoning.", {"type": _kind("thinking"), "thinking": STRING, "signature": STRING}),
    shape("A call.", {"type": _kind("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}),
)
ANSWERS: dict[str, Schema] = {
    "AnthropicAnswer": shape(
        "A message of the assistant; send its content back as it is.",
        {
            "id": STRING,
            "type": _kind("message"),
            "role": _kind("assistant"),
            "model": STRING,
            "content": listed(ANSWER_BLOCK),
            "stop_reason": _one_of(REASONS),
            "stop_sequence": TEXT_OR_NULL,
            "stop_details": NULL,
            "container": NULL,
            "usage": USAGE,
        },
    ),
    "AnthropicEvent": shape("One event; see docs/anthropic.md.", {"type": STRING}),
    "TokenCount": shape("The tokens of a prompt.", {"input_tokens": COUNT}),
    "AnthropicError": shape(
        "Anthropic's envelope of an error.",
        {
            "type": _kind("error"),
            "error": shape(
                "What went wrong.",
                {
                    "type": _one_of((*ANTHROPIC_TYPES.values(), "invalid_request_error", "api_error")),
                    "message": {**STRING, "description": "Cause and cure, with the field at fault."},
                },
            ),
        },
        request_id=STRING,
    ),
}


def anthropic_schemas() -> dict[str, Schema]:
    """Return all schemas of the dialect by name."""
    shapes = [(Messages, "validation"), (Conversation, "validation")]
    _, defined = models_json_schema(shapes, ref_template=REF + "{model}")  # type: ignore[arg-type]
    requests = {"MessagesRequest": defined["$defs"]["Messages"], "CountTokensRequest": defined["$defs"]["Conversation"]}
    for schema in requests.values():
        schema["properties"] = {name: _tidy(field) for name, field in schema["properties"].items()}
        schema["properties"]["messages"]["description"] += f" At most {MAX_MESSAGES} messages."
        for kind in schema["properties"]["tools"]["anyOf"][:1]:
            kind["maxItems"] = MAX_TOOLS
    return requests | OPTIONS | BLOCKS | ANSWERS


def _tidy(field: Schema) -> Schema:
    """Return the field without redundant keywords: its title, and the default null."""
    return {key: value for key, value in field.items() if key != "title" and (key, value) != ("default", None)}
