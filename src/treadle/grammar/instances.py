"""Validity of values that a schema lists, under the keywords beside them.

What llguidance intersects with listed values itself is left to it: patterns and formats of strings, and other schemas.
Below those keywords, in properties and items, schemas are followed as far as they need no regular expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from ..errors import InvalidRequest
from . import keywords
from .formats import NATIVE, PATTERNS, REFUSED
from .places import Node, below, refusal
from .references import References

MAX_CHECKS = 100_000
"""Most schemas that values of one document are compared with."""
MAX_DEPTH = 64

Schema = dict[str, Any]


class Instances:
    """Checks of values against schemas of the document of `refs`. `modern` writes a schema as Draft 2020-12 does."""

    def __init__(self, refs: References, modern: Callable[[Schema], Schema]) -> None:
        self._refs = refs
        self._modern = modern
        self._checks = 0

    def valid(self, values: Iterable[Any], schema: Schema, at: Node) -> list[Any]:
        """Return the values that are valid. Raises InvalidRequest for a keyword that is not understood here."""
        return [value for value in values if self._is_valid(value, schema, at)]

    def satisfying(self, values: Iterable[Any], schema: Schema, at: Node) -> list[Any]:
        """Return the values that are valid, but for what llguidance compares with them. Raises as `valid` does."""
        return [value for value in values if self._satisfies(value, schema, at)]

    def _is_valid(self, value: Any, schema: Any, at: Node) -> bool:
        """Whether a value is valid under a whole schema."""
        if isinstance(keywords.of_schema(schema, at.place), bool):
            return bool(schema)
        if at.levels > MAX_DEPTH:
            raise refusal(at.place, f"is below over {MAX_DEPTH} other schemas: flatten it")
        keywords.check(schema, at.place)
        schema = self._modern(schema)
        if isinstance(value, str):
            self._refuse_expressions(schema, at)
        return self._satisfies(value, schema, at) and self._applies(value, schema, at)

    def _refuse_expressions(self, schema: Schema, at: Node) -> None:
        if "pattern" in schema:
            raise _not_beside(at, "pattern")
        if schema.get("format") in NATIVE | REFUSED | PATTERNS.keys():
            raise _not_beside(at, "format")

    def _applies(self, value: Any, schema: Schema, at: Node) -> bool:
        """Whether a value is valid under the schemas that apply to it as a whole."""
        matches = {
            key: [self._is_valid(value, part, at.below(key, index)) for index, part in enumerate(schema.get(key, ()))]
            for key in ("allOf", "anyOf", "oneOf")
        }
        if not all(matches["allOf"]) or ("anyOf" in schema and not any(matches["anyOf"])):
            return False
        if "oneOf" in schema and sum(matches["oneOf"]) != 1:
            return False
        if "$ref" not in schema:
            return True
        pointer = self._refs.pointer(schema["$ref"], below(at.place, "$ref"))
        there = Node(self._refs.place(pointer), levels=at.levels + 1)
        return self._is_valid(value, self._refs.schema(pointer), there)

    def _satisfies(self, value: Any, schema: Schema, at: Node) -> bool:
        """Whether a value has the schema's type, is one of its values, and is within its limits, also in its parts."""
        self._checks += 1
        if self._checks > MAX_CHECKS:
            raise refusal(at.place, "takes too long to compare with the values listed in it: list fewer")
        if "type" in schema and not types_of(value) & {*keywords.types_of({"type": schema["type"]})}:
            return False
        if "enum" in schema and not any(same(value, other) for other in schema["enum"]):
            return False
        if "const" in schema and not same(value, schema["const"]):
            return False
        match value:
            case None | bool():
                return True
            case int() | float():
                return _is_number_within(Fraction(str(value)), schema)
            case str():
                return _has_size(value, schema, "Length")
            case list():
                return self._is_array_of(value, schema, at)
        return self._is_object_of(value, schema, at)

    def _is_array_of(self, value: list[Any], schema: Schema, at: Node) -> bool:
        if schema.get("unevaluatedItems", True) is not True:
            raise _not_beside(at, "unevaluatedItems")
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        return _has_size(value, schema, "Items") and all(
            self._is_valid(item, prefix[index], at.below("prefixItems", index))
            if index < len(prefix)
            else self._is_valid(item, rest, at.below("items"))
            for index, item in enumerate(value)
        )

    def _is_object_of(self, value: dict[str, Any], schema: Schema, at: Node) -> bool:
        for key in ("patternProperties", "unevaluatedProperties"):
            if schema.get(key, {}) not in ({}, True):
                raise _not_beside(at, key)
        if not _has_size(value, schema, "Properties") or not {*schema.get("required", ())} <= value.keys():
            return False
        names, rest = schema.get("propertyNames", True), schema.get("additionalProperties", True)
        listed = schema.get("properties", {})
        return all(
            self._is_valid(name, names, at.below("propertyNames"))
            and (
                self._is_valid(part, listed[name], at.below("properties", name))
                if name in listed
                else self._is_valid(part, rest, at.below("additionalProperties"))
            )
            for name, part in value.items()
        )


def _not_beside(at: Node, key: str) -> InvalidRequest:
    return refusal(below(at.place, key), "is not supported beside listed values: list only those that it allows")


def _has_size(value: str | list[Any] | dict[str, Any], schema: Schema, of: str) -> bool:
    return bool(schema.get(f"min{of}", 0) <= len(value) <= schema.get(f"max{of}", len(value)))


def _is_number_within(value: Fraction, schema: Schema) -> bool:
    limits = {key: Fraction(str(schema[key])) for key in keywords.OF_NUMBERS if key in schema}
    return (
        limits.get("minimum", value) <= value <= limits.get("maximum", value)
        and ("exclusiveMinimum" not in limits or value > limits["exclusiveMinimum"])
        and ("exclusiveMaximum" not in limits or value < limits["exclusiveMaximum"])
        and ("multipleOf" not in limits or value % limits["multipleOf"] == 0)
    )


def types_of(value: Any) -> set[str]:
    """Return the types of JSON Schema that a value has."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"number", "integer"} if value == int(value) else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(part, other[name]) for name, part in one.items())
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
