"""Grammar of objects in Gemma's notation (see `bare_notation`), by the JSON schema of a tool's parameters.

Types, enums, properties, items and alternatives are kept, and the bounds of numbers, arrays and strings; patterns and
formats of strings are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import InvalidRequest
from .lark import Grammar, any_of, literal
from .typed_values import resolve

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMMA = ' "," '
_BARE_KEY = re.compile(r"[\w.$-]+")
_ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_]*:/"


class BareGrammar:
    """Expressions of values with `delimiter` around strings. `root` is the schema that `$ref` refers to."""

    def __init__(self, grammar: Grammar, delimiter: str, root: Mapping[str, Any]) -> None:
        self._grammar = grammar
        self._delimiter = delimiter
        self._root = root
        self._recursive: dict[str, str] = {}

    def object(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of an object with the properties of `schema`; of any object if it names none.

        Raises InvalidRequest for a `$ref` that leads nowhere.
        """
        if schema.get("properties"):
            return f'"{{" {self._members(schema)} "}}"'
        extra = schema.get("additionalProperties", True)
        if extra is False:
            return '"{" "}"'
        member = self._grammar.rule("member", f"{_ANY_KEY} {self._value(extra)}")
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _members(self, schema: Mapping[str, Any]) -> str:
        required = schema.get("required") or ()
        members = [
            (f"{self._key(name)} {self._value(value)}", name in required)
            for name, value in schema["properties"].items()
        ]
        return self._grammar.separated(members, ",")

    def _key(self, name: str) -> str:
        return literal(f"{name}:") if _BARE_KEY.fullmatch(name) else f'{self._text(name)} ":"'

    def _text(self, text: str) -> str:
        delimiter = self._grammar.text(self._delimiter)
        return f"{delimiter} {literal(text)} {delimiter}"

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping) or not schema:
            return self._rule("any", {})
        if "$ref" in schema:
            return self._rule("ref", self._found(schema), str(schema["$ref"]))
        if "const" in schema:
            return self._constant(schema["const"])
        for key in ("enum", "anyOf", "oneOf"):
            if isinstance(choices := schema.get(key), list) and choices:
                return _one_of(map(self._constant if key == "enum" else self._value, choices))
        if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            return self._value({**parts[0], **{key: part for key, part in schema.items() if key != "allOf"}})
        return _one_of(self._of_type(kind, schema) for kind in _types_of(schema))

    def _found(self, schema: Mapping[str, Any]) -> Any:
        found, target = resolve(schema, self._root), str(schema["$ref"])
        if found is None or not target.startswith("#"):
            raise InvalidRequest(f"a tool's parameters refer to {target!r}, which is not in them", param="tools")
        return found

    def _rule(self, prefix: str, schema: Any, key: str = "") -> str:
        """Return the rule of a schema's values, which may refer to itself. An empty schema allows any value."""

        def make(name: str) -> str:
            self._recursive[key] = name
            return self._value(schema) if schema else _one_of(self._of_type(kind, {}) for kind in _TYPES)

        return self._recursive.get(key) or self._grammar.recursive(prefix, make)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            members = (f"{self._key(key)} {self._constant(member)}" for key, member in value.items())
            return f'"{{" {_COMMA.join(members)} "}}"'
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._constant, value))} "]"'
        return literal(json.dumps(value))

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._array(schema)
            case "object":
                return self.object(schema)
            case "string":
                return self._string(schema.get("minLength", 0), schema.get("maxLength", ""))
            case _:
                bounds = {key: schema[key] for key in _NUMBER_KEYS if key in schema}
                return self._grammar.json({"type": kind, **bounds})

    def _string(self, least: Any, most: Any) -> str:
        length = f"/(?s:.{{{least},{most}}})/" if (least, most) != (0, "") else ""
        text = self._grammar.text_until(self._delimiter, [self._delimiter], length)
        return f"{self._grammar.text(self._delimiter)} {text}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        item = self._grammar.rule("item", self._value(schema.get("items")))
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'


def _types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type")
    if kinds is None:
        kinds = "object" if "properties" in schema else "array" if "items" in schema else _TYPES
    return tuple(kind for kind in _TYPES if kind == kinds or (kind in kinds and not isinstance(kinds, str))) or _TYPES


def _one_of(choices: Iterable[str]) -> str:
    unique = list(dict.fromkeys(choices))
    return unique[0] if len(unique) == 1 else any_of(unique)
