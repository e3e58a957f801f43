"""Keywords of JSON Schema: those that grammars enforce, those that are refused, and the shapes of their values.

Every other keyword is an annotation, as the standard has it: it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidRequest
from .places import below, refusal

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

OF_OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    *("propertyNames", "unevaluatedProperties"),
)
OF_ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "unevaluatedItems")
OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref")
VALUES = ("enum", "const")

ASSERTIONS = {
    **dict.fromkeys(OF_OBJECTS, ("object",)),
    **dict.fromkeys(OF_ARRAYS, ("array",)),
    **dict.fromkeys(OF_STRINGS, ("string",)),
    **dict.fromkeys(OF_NUMBERS, ("integer", "number")),
}
"""Types that a keyword says something about."""

REFUSED = {
    "not": "describe the allowed values instead, with enum, const or pattern",
    "if": "use anyOf with one schema for each case",
    "dependentRequired": "list the properties in required, or use anyOf with one schema for each case",
    "dependentSchemas": "use anyOf with one schema for each case",
    "dependencies": "use anyOf with one schema for each case",
    "contains": "use items, or prefixItems",
    "uniqueItems": "leave it out and drop duplicates from the answer",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
"""Keywords that change which values are valid and that no grammar here can enforce, each with what to do instead."""

_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "not": lambda value: value is False,
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "uniqueItems": lambda value: value is False,
}


def check(node: dict[str, Any], place: str) -> None:
    """Raise InvalidRequest for a keyword that is refused, or whose value has the wrong shape."""
    for key, value in node.items():
        if key in REFUSED and not _HARMLESS.get(key, _never)(value) and not _single(key, node):
            raise refusal(below(place, key), f"is not supported in a grammar: {REFUSED[key]}")
        shape = _SHAPES.get(key)
        if shape and not shape[0](value):
            raise refusal(below(place, key), f"must be {shape[1]}")


def of_schema(node: Any, place: str) -> dict[str, Any] | bool:
    """Return `node`. Raises InvalidRequest unless it can be a schema."""
    if isinstance(node, dict | bool):
        return node
    raise InvalidRequest(f"{place} must be a JSON Schema: an object, true or false", param=place)


def types_of(node: dict[str, Any]) -> tuple[str, ...]:
    """Return the types that `node` names, or those that its keywords are about; none for any type."""
    named = node.get("type")
    if named is not None:
        return tuple([named] if isinstance(named, str) else named)
    about = {name for key in node for name in ASSERTIONS.get(key, ())}
    return tuple(name for name in TYPES if name in about and not (name == "integer" and "number" in about))


def _single(key: str, node: dict[str, Any]) -> bool:
    return key == "uniqueItems" and isinstance(node.get("maxItems"), int) and node["maxItems"] <= 1


def _never(value: Any) -> bool:
    return False


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_limit(value: Any) -> bool:
    return isinstance(value, bool) or _is_number(value)  # Draft 4 has booleans


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _are_names(value) and bool(value) and set(value) <= {*TYPES}


_COUNT = (_is_count, "a whole number from 0 to 2147483647")
_NUMBER = (_is_number, "a number")
_LIMIT = (_is_limit, "a number")
_MAP = (lambda value: isinstance(value, dict), "an object of schemas")
_LIST = (lambda value: isinstance(value, list) and bool(value), "a list of at least one schema")
_TEXT = (lambda value: isinstance(value, str), "a string")

_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of these"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
    "properties": _MAP,
    "patternProperties": _MAP,
    "required": (_are_names, "a list of names"),
    **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _LIST),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
}
