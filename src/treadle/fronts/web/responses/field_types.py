"""JSON schemas of the requests' objects, and their types in requests.

The schemas are documentation: `items`, `tools` and `parsed` read the values.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from ...chat_messages import MAX_PARTS
from ...reasoning_fields import EFFORTS
from ...tool_fields import MAX_DESCRIPTION_CHARS, MAX_TOOLS, NAME_PATTERN
from .items import MAX_ITEMS, ROLES

Schema = dict[str, Any]

MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""The API's limits of `metadata`."""
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
INCLUDABLE = (
    *(ENCRYPTED, LOGPROBS, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
SUMMARIES = ("auto", "concise", "detailed")
TRUNCATIONS = ("auto", "disabled")
VERBOSITIES = ("low", "medium", "high")


def _typed(schema: Schema) -> Any:
    return Annotated[Any, WithJsonSchema(schema)]


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _object(needed: Schema, **more: Schema) -> Schema:
    return {"type": "object", "properties": {**needed, **more}, "required": list(needed)}


_TEXT: Schema = {"type": "string"}
_ID: Schema = {"type": "string", "minLength": 1}
_NULLABLE: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"type": ["boolean", "null"]}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_INPUT_PART = _object({"type": {"enum": ["input_text", "output_text", "text"]}, "text": _TEXT})
_REFUSAL = _object({"type": {"const": "refusal"}, "refusal": _TEXT})
_PARTS: Schema = {"type": "array", "items": _INPUT_PART, "minItems": 1, "maxItems": MAX_PARTS}
_OUTPUT_PARTS: Schema = {"type": "array", "items": {"anyOf": [_INPUT_PART, _REFUSAL]}, "maxItems": MAX_PARTS}
_MESSAGE_TYPE: Schema = {"enum": ["message", None]}
_MESSAGES = [
    _object(
        {"role": {"enum": [role for role in ROLES if role != "assistant"]}, "content": {"anyOf": [_TEXT, _PARTS]}},
        type=_MESSAGE_TYPE,
        id=_NULLABLE,
        phase=_NULLABLE,
    ),
    _object(
        {"role": {"const": "assistant"}, "content": {"anyOf": [_TEXT, _OUTPUT_PARTS]}},
        type=_MESSAGE_TYPE,
        id=_NULLABLE,
        phase=_NULLABLE,
    ),
]
_CALL = _object(
    {"type": {"const": "function_call"}, "call_id": _ID, "name": _ID, "arguments": {"type": ["string", "object"]}},
    id=_NULLABLE,
    status=_NULLABLE,
    namespace=_NULLABLE,
)
_CUSTOM_CALL = _object(
    {"type": {"const": "custom_tool_call"}, "call_id": _ID, "name": _ID, "input": _TEXT},
    id=_NULLABLE,
    status=_NULLABLE,
    namespace=_NULLABLE,
)
_RESULT = _object(
    {
        "type": {"enum": ["function_call_output", "custom_tool_call_output"]},
        "call_id": _ID,
        "output": {"anyOf": [_TEXT, {**_PARTS, "minItems": 0}]},
    },
    id=_NULLABLE,
)
_TEXTS = _or_null({"type": "array", "items": _object({"text": _TEXT})})
_REASONING = _object(
    {"type": {"const": "reasoning"}}, id=_NULLABLE, summary=_TEXTS, content=_TEXTS, encrypted_content=_NULLABLE
)
INPUT_ITEM: Schema = {
    "anyOf": [*_MESSAGES, _CALL, _CUSTOM_CALL, _RESULT, _REASONING],
    "description": "A message, a call, the result of a call, or reasoning, as answers have them. Also taken: "
    "`item_reference`, `compaction`, calls of `local_shell`, `shell` and `apply_patch` with their results, and records "
    "of hosted tools, which are left out. Unknown keys are ignored.",
}
_INPUT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": INPUT_ITEM, "minItems": 1, "maxItems": MAX_ITEMS}]}

_PARAMETERS = _or_null({"type": "object", "description": "A JSON Schema; see docs/structured-output.md for keywords."})
_DESCRIPTION: Schema = {"type": ["string", "null"], "maxLength": MAX_DESCRIPTION_CHARS}
_FUNCTION = _object(
    {"type": {"const": "function"}, "name": _NAME}, description=_DESCRIPTION, parameters=_PARAMETERS, strict=_FLAG
)
_CUSTOM = _object({"type": {"const": "custom"}, "name": _NAME}, description=_DESCRIPTION)
_SPACE = _object(
    {
        "type": {"const": "namespace"},
        "name": _NAME,
        "tools": {"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}},
    }
)
_TOOLS = _or_null({"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM, _SPACE]}, "maxItems": MAX_TOOLS})
_NAMED = _object({"type": {"enum": ["function", "custom"]}, "name": _NAME}, namespace=_NULLABLE)
_ALLOWED = _object(
    {"type": {"const": "allowed_tools"}, "tools": {"type": "array", "items": _NAMED, "minItems": 1}},
    mode={"enum": ["auto", "required"]},
)
_CHOICE = _or_null({"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED)
_FORMAT = _or_null(
    _object({"type": {"enum": ["text", "json_object"]}}),
    _object({"type": {"const": "json_schema"}, "schema": {"type": "object"}}, name=_TEXT, strict=_FLAG),
)
_TEXT_OPTIONS = _or_null(_object({}, format=_FORMAT, verbosity={"enum": [None, *VERBOSITIES]}))
_REASONING_OPTIONS = _or_null(_object({}, effort={"enum": [None, *EFFORTS]}, summary={"enum": [None, *SUMMARIES]}))
_METADATA = _or_null(
    {
        "type": "object",
        "maxProperties": MAX_PAIRS,
        "propertyNames": {"maxLength": MAX_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
    }
)
_INCLUDE = _or_null({"type": "array", "items": {"enum": list(INCLUDABLE)}})

Input = _typed(_INPUT)
ToolsField = _typed(_TOOLS)
Choice = _typed(_CHOICE)
TextOptions = _typed(_TEXT_OPTIONS)
ReasoningField = _typed(_REASONING_OPTIONS)
Include = _typed(_INCLUDE)
Metadata = _typed(_METADATA)
Truncation = _typed({"enum": [None, *TRUNCATIONS]})
