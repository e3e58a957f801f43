"""JSON schemas of the requests' objects, and their types in requests.

The schemas are documentation: `items`, `tools` and `parsed` read the values.
"""

from __future__ import annotations

from ...chat_messages import MAX_PARTS
from ...reasoning_fields import EFFORTS
from ...tool_fields import MAX_DESCRIPTION_CHARS, MAX_TOOLS, NAME_PATTERN
from ..json_schemas import FLAG, STRING, TEXT_OR_NULL, Schema, object_of, or_null, typed
from .items import MAX_ITEMS, ROLES

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


_ID: Schema = {"type": "string", "minLength": 1}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_INPUT_PART = object_of({"type": {"enum": ["input_text", "output_text", "text"]}, "text": STRING})
_REFUSAL = object_of({"type": {"const": "refusal"}, "refusal": STRING})
_PARTS: Schema = {"type": "array", "items": _INPUT_PART, "minItems": 1, "maxItems": MAX_PARTS}
_OUTPUT_PARTS: Schema = {"type": "array", "items": {"anyOf": [_INPUT_PART, _REFUSAL]}, "maxItems": MAX_PARTS}
_MESSAGE_TYPE: Schema = {"enum": ["message", None]}
_MESSAGES = [
    object_of(
        {"role": {"enum": [role for role in ROLES if role != "assistant"]}, "content": {"anyOf": [STRING, _PARTS]}},
        type=_MESSAGE_TYPE,
        id=TEXT_OR_NULL,
        phase=TEXT_OR_NULL,
    ),
    object_of(
        {"role": {"const": "assistant"}, "content": {"anyOf": [STRING, _OUTPUT_PARTS]}},
        type=_MESSAGE_TYPE,
        id=TEXT_OR_NULL,
        phase=TEXT_OR_NULL,
    ),
]
_CALL = object_of(
    {"type": {"const": "function_call"}, "call_id": _ID, "name": _ID, "arguments": {"type": ["string", "object"]}},
    id=TEXT_OR_NULL,
    status=TEXT_OR_NULL,
    namespace=TEXT_OR_NULL,
)
_CUSTOM_CALL = object_of(
    {"type": {"const": "custom_tool_call"}, "call_id": _ID, "name": _ID, "input": STRING},
    id=TEXT_OR_NULL,
    status=TEXT_OR_NULL,
    namespace=TEXT_OR_NULL,
)
_RESULT = object_of(
    {
        "type": {"enum": ["function_call_output", "custom_tool_call_output"]},
        "call_id": _ID,
        "output": {"anyOf": [STRING, {**_PARTS, "minItems": 0}]},
    },
    id=TEXT_OR_NULL,
)
_TEXTS = or_null({"type": "array", "items": object_of({"text": STRING})})
_REASONING = object_of(
    {"type": {"const": "reasoning"}}, id=TEXT_OR_NULL, summary=_TEXTS, content=_TEXTS, encrypted_content=TEXT_OR_NULL
)
INPUT_ITEM: Schema = {
    "anyOf": [*_MESSAGES, _CALL, _CUSTOM_CALL, _RESULT, _REASONING],
    "description": "A message, a call, the result of a call, or reasoning, as answers have them. Also taken: "
    "`item_reference`, `compaction`, calls of `local_shell`, `shell` and `apply_patch` with their results, and records "
    "of hosted tools, which are left out. Unknown keys are ignored.",
}
_INPUT: Schema = {"anyOf": [STRING, {"type": "array", "items": INPUT_ITEM, "minItems": 1, "maxItems": MAX_ITEMS}]}

_PARAMETERS = or_null({"type": "object", "description": "A JSON Schema; see docs/structured-output.md for keywords."})
_DESCRIPTION: Schema = {"type": ["string", "null"], "maxLength": MAX_DESCRIPTION_CHARS}
_FUNCTION = object_of(
    {"type": {"const": "function"}, "name": _NAME}, description=_DESCRIPTION, parameters=_PARAMETERS, strict=FLAG
)
_CUSTOM = object_of({"type": {"const": "custom"}, "name": _NAME}, description=_DESCRIPTION)
_SPACE = object_of(
    {
        "type": {"const": "namespace"},
        "name": _NAME,
        "tools": {"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM]}},
    }
)
_TOOLS = or_null({"type": "array", "items": {"anyOf": [_FUNCTION, _CUSTOM, _SPACE]}, "maxItems": MAX_TOOLS})
_NAMED = object_of({"type": {"enum": ["function", "custom"]}, "name": _NAME}, namespace=TEXT_OR_NULL)
_ALLOWED = object_of(
    {"type": {"const": "allowed_tools"}, "tools": {"type": "array", "items": _NAMED, "minItems": 1}},
    mode={"enum": ["auto", "required"]},
)
_CHOICE = or_null({"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED)
_FORMAT = or_null(
    object_of({"type": {"enum": ["text", "json_object"]}}),
    object_of({"type": {"const": "json_schema"}, "schema": {"type": "object"}}, name=STRING, strict=FLAG),
)
_TEXT_OPTIONS = or_null(object_of({}, format=_FORMAT, verbosity={"enum": [None, *VERBOSITIES]}))
_REASONING_OPTIONS = or_null(object_of({}, effort={"enum": [None, *EFFORTS]}, summary={"enum": [None, *SUMMARIES]}))
_METADATA = or_null(
    {
        "type": "object",
        "maxProperties": MAX_PAIRS,
        "propertyNames": {"maxLength": MAX_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
    }
)
_INCLUDE = or_null({"type": "array", "items": {"enum": list(INCLUDABLE)}})

Input = typed(_INPUT)
ToolsField = typed(_TOOLS)
Choice = typed(_CHOICE)
TextOptions = typed(_TEXT_OPTIONS)
ReasoningField = typed(_REASONING_OPTIONS)
Include = typed(_INCLUDE)
Metadata = typed(_METADATA)
Truncation = typed({"enum": [None, *TRUNCATIONS]})
