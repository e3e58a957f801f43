"""JSON schemas of the fields for tools, structured output and reasoning, and their types in requests.

The schemas are documentation: `tool_fields`, `output_fields` and `reasoning_fields` read the values, for every front.
"""

from __future__ import annotations

from ...chat_messages import MAX_PARTS
from ...reasoning_fields import EFFORTS, THINKING_TYPES
from ...tool_fields import MAX_DESCRIPTION_CHARS, MAX_TOOLS, NAME_PATTERN
from ..json_schemas import FLAG, STRING, Schema, either, listed, object_of, or_null, typed

_JSON_SCHEMA: Schema = {"type": "object", "description": "A JSON Schema; see docs/structured-output.md for keywords."}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_BUDGET: Schema = {"type": ["integer", "null"], "minimum": -1, "maximum": 2**31 - 1}
_EFFORT: Schema = {"enum": [None, *EFFORTS]}


_FUNCTION = object_of(
    {"name": _NAME},
    description={"type": ["string", "null"], "maxLength": MAX_DESCRIPTION_CHARS},
    parameters=or_null(_JSON_SCHEMA),
    strict={**FLAG, "description": "True: a schema that a grammar can't hold is refused."},
)
_NAMED = object_of({"type": {"const": "function"}, "function": object_of({"name": _NAME})})
_ALLOWED = object_of(
    {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED, "minItems": 1}}
)
_MODES: Schema = {"enum": ["none", "auto", "required"]}
_CHOICE = or_null(_MODES, _NAMED, object_of({"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED}))
_OUTPUT_SCHEMA = object_of({"schema": _JSON_SCHEMA}, name=STRING, description=STRING, strict=FLAG)
_FORMAT = or_null(
    object_of({"type": {"const": "text"}}),
    object_of({"type": {"const": "json_object"}}, schema=or_null(_JSON_SCHEMA)),
    object_of({"type": {"const": "json_schema"}, "json_schema": _OUTPUT_SCHEMA}),
)
_CHOICES: Schema = {"type": "array", "items": {**STRING, "minLength": 1}, "minItems": 1}
_STRUCTURED_KINDS: Schema = {
    "json": {"anyOf": [_JSON_SCHEMA, STRING]},
    "regex": STRING,
    "choice": _CHOICES,
    "grammar": STRING,
    "json_object": {"const": True},
    "structural_tag": STRING,
}
_ABSENT: Schema = {"enum": [None, False]}


def _one_of(kinds: Schema) -> Schema:
    """Return the schema of an object with exactly one of the members `kinds`; the others may be null or false."""
    shapes = [dict.fromkeys(kinds, _ABSENT) | {name: schema} for name, schema in kinds.items()]
    return {
        "oneOf": [
            {"type": "object", "properties": shape, "required": [name], "additionalProperties": False}
            for name, shape in zip(kinds, shapes, strict=True)
        ]
    }


_STRUCTURED = _one_of(_STRUCTURED_KINDS)

Tools = typed(
    or_null(
        {
            "type": "array",
            "items": object_of({"type": {"const": "function"}, "function": _FUNCTION}),
            "maxItems": MAX_TOOLS,
        }
    )
)
Functions = typed(or_null({"type": "array", "items": _FUNCTION, "maxItems": MAX_TOOLS}))
ToolChoiceField = typed(_CHOICE)
FunctionCall = typed(or_null({"enum": ["none", "auto"]}, object_of({"name": _NAME})))
ResponseFormat = typed(_FORMAT)
StructuredOutputs = typed(or_null(_STRUCTURED))
JsonSchema = typed(or_null(_JSON_SCHEMA, STRING))
Pattern = typed(or_null(STRING))
Choices = typed(or_null(_CHOICES))
OllamaFormat = typed(or_null({"enum": ["", "json"]}, _JSON_SCHEMA))
Effort = typed(_EFFORT)
Reasoning = typed(or_null(object_of({}, effort=_EFFORT, max_tokens=_BUDGET, enabled=FLAG, exclude=FLAG)))
_TYPES: Schema = {"enum": list(THINKING_TYPES)}
Thinking = typed(or_null(object_of({"type": _TYPES}, budget_tokens=_BUDGET), {"type": "boolean"}))
Think = typed(or_null({"type": "boolean"}, {"enum": list(EFFORTS)}))
Budget = typed(_BUDGET)
Shown = typed(FLAG)
_TEXT_PART = object_of({"type": {"const": "text"}, "text": STRING})
_PREDICTED = {"type": {"const": "content"}, "content": either(STRING, listed(_TEXT_PART, maxItems=MAX_PARTS))}
Prediction = typed(or_null({**object_of(_PREDICTED), "additionalProperties": False}))
