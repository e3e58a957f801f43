"""JSON schemas of the fields for tools, structured output and reasoning, and their types in requests.

The schemas are documentation: `tool_fields`, `output_fields` and `reasoning_fields` read the values, for every front.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from ...reasoning_fields import EFFORTS, THINKING_TYPES
from ...tool_fields import MAX_DESCRIPTION_CHARS, MAX_TOOLS, NAME_PATTERN

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_JSON_SCHEMA: Schema = {"type": "object", "description": "A JSON Schema; see docs/structured-output.md for keywords."}
_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_BUDGET: Schema = {"type": ["integer", "null"], "minimum": -1, "maximum": 2**31 - 1}
_EFFORT: Schema = {"enum": [None, *EFFORTS]}


def _object(needed: Schema, **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**needed, **optional}, "required": list(needed)}


def _or_null(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}]}


def _typed(schema: Schema) -> Any:
    return Annotated[Any, WithJsonSchema(schema)]


_FUNCTION = _object(
    {"name": _NAME},
    description={"type": ["string", "null"], "maxLength": MAX_DESCRIPTION_CHARS},
    parameters=_or_null(_JSON_SCHEMA),
    strict={**_FLAG, "description": "True: a schema that a grammar can't hold is refused."},
)
_NAMED = _object({"type": {"const": "function"}, "function": _object({"name": _NAME})})
_ALLOWED = _object({"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED, "minItems": 1}})
_MODES: Schema = {"enum": ["none", "auto", "required"]}
_CHOICE = _or_null(_MODES, _NAMED, _object({"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED}))
_OUTPUT_SCHEMA = _object({"schema": _JSON_SCHEMA}, name=_TEXT, description=_TEXT, strict=_FLAG)
_FORMAT = _or_null(
    _object({"type": {"const": "text"}}),
    _object({"type": {"const": "json_object"}}, schema=_or_null(_JSON_SCHEMA)),
    _object({"type": {"const": "json_schema"}, "json_schema": _OUTPUT_SCHEMA}),
)
_CHOICES: Schema = {"type": "array", "items": {**_TEXT, "minLength": 1}, "minItems": 1}
_STRUCTURED_KINDS: Schema = {
    "json": {"anyOf": [_JSON_SCHEMA, _TEXT]},
    "regex": _TEXT,
    "choice": _CHOICES,
    "grammar": _TEXT,
    "json_object": {"const": True},
    "structural_tag": _TEXT,
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

Tools = _typed(
    _or_null(
        {
            "type": "array",
            "items": _object({"type": {"const": "function"}, "function": _FUNCTION}),
            "maxItems": MAX_TOOLS,
        }
    )
)
Functions = _typed(_or_null({"type": "array", "items": _FUNCTION, "maxItems": MAX_TOOLS}))
ToolChoiceField = _typed(_CHOICE)
FunctionCall = _typed(_or_null({"enum": ["none", "auto"]}, _object({"name": _NAME})))
ResponseFormat = _typed(_FORMAT)
StructuredOutputs = _typed(_or_null(_STRUCTURED))
JsonSchema = _typed(_or_null(_JSON_SCHEMA, _TEXT))
Pattern = _typed(_or_null(_TEXT))
Choices = _typed(_or_null(_CHOICES))
OllamaFormat = _typed(_or_null({"enum": ["", "json"]}, _JSON_SCHEMA))
Effort = _typed(_EFFORT)
Reasoning = _typed(_or_null(_object({}, effort=_EFFORT, max_tokens=_BUDGET, enabled=_FLAG, exclude=_FLAG)))
_TYPES: Schema = {"enum": list(THINKING_TYPES)}
Thinking = _typed(_or_null(_object({"type": _TYPES}, budget_tokens=_BUDGET), {"type": "boolean"}))
Think = _typed(_or_null({"type": "boolean"}, {"enum": list(EFFORTS)}))
Budget = _typed(_BUDGET)
Shown = _typed(_FLAG)
