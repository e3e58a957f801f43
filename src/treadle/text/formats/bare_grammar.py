"""Grammar of objects in Gemma's notation (see `bare_notation`), by the JSON schema of a tool's parameters.

Types, enums, properties, items and alternatives are kept, and the bounds of numbers, arrays and strings; patterns and
formats of strings are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .any_key import repeated
from .base import ToolSpec
from .lark import Grammar, any_of, literal
from .schema_branches import TYPES, SchemaRoot, Unheld, lengths, unheld_names
from .typed_grammar import give_up, members_of, objects_of

MAX_DEPTH = 64
"""Most schemas that stand in one another."""

_NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMMA = ' "," '
_BARE_KEY = re.compile(r"[\w.$-]+")
_ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_]*:/"


class BareGrammar:
    """Expressions of the arguments of `tool`, with `delimiter` around strings."""

    def __init__(self, grammar: Grammar, delimiter: str, tool: ToolSpec) -> None:
        self._grammar = grammar
        self._delimiter = delimiter
        self._tool = tool
        self._root = SchemaRoot(tool.parameters, exact=tool.strict, tool=tool.name)
        self._recursive: dict[str, str] = {}
        self._depth = 0

    def arguments(self) -> str:
        """Return the expression of an object with the tool's parameters; of any object if it names none. Raises Unheld
        for a strict tool with a schema that can't be held."""
        found = objects_of(self._tool, self._root, self._grammar)
        return _one_of([self._object(branch, self._parameter) for branch in found])

    def _parameter(self, key: str, schema: Any) -> str:
        try:
            return self._value(schema)
        except Unheld as fault:
            give_up(fault, key, self._root, self._grammar)
            return self._value({})

    def _object(self, schema: Mapping[str, Any], value: Any) -> str:
        """Return the expression of an object by its plain schema; `value` returns that of a property."""
        if self._root.exact and (key := unheld_names(schema)):
            raise Unheld(f"has {key}, which calls in the model's format can't be held to")
        if members := members_of(schema):
            required = schema.get("required") or ()
            parts = [(f"{self._key(name)} {value(name, part)}", name in required) for name, part in members.items()]
            return f'"{{" {self._grammar.separated(parts, ",")} "}}"'
        extra = schema.get("additionalProperties", True)
        if extra is False or ("properties" in schema and "additionalProperties" not in schema):
            return '"{" "}"'
        member = self._grammar.rule("member", f"{_ANY_KEY} {self._value(extra)}")
        return f'"{{" {repeated(member, ",", schema)} "}}"'

    def _key(self, name: str) -> str:
        return literal(f"{name}:") if _BARE_KEY.fullmatch(name) else f'{self._text(name)} ":"'

    def _text(self, text: str) -> str:
        if self._delimiter in text:
            raise Unheld(f"has the text {text[:100]!r}, which can't be written in the model's format")
        delimiter = self._grammar.text(self._delimiter)
        return f"{delimiter} {literal(text)} {delimiter}"

    def _value(self, schema: Any) -> str:
        """Return the rule of a schema's values, which may refer to itself. An empty schema allows any value."""
        key = json.dumps(schema, sort_keys=True) if isinstance(schema, Mapping) else "{}"

        def make(name: str) -> str:
            self._recursive[key] = name
            return _one_of([one for branch in self._root.branches(schema) for one in self._plain(branch)])

        if key in self._recursive:
            return self._recursive[key]
        if self._depth == MAX_DEPTH:
            raise Unheld(f"is nested deeper than {MAX_DEPTH} levels: flatten it")
        self._depth += 1
        before = dict(self._recursive)
        try:
            return self._grammar.recursive("value", make)
        except Unheld:
            self._recursive = before
            raise
        finally:
            self._depth -= 1

    def _plain(self, branch: Mapping[str, Any]) -> Iterable[str]:
        """Return the expressions of the values of a plain schema."""
        if "enum" not in branch:
            return [self._of_type(kind, branch) for kind in branch["type"] or TYPES]
        found, fault = [], None
        for value in branch["enum"]:
            try:
                found.append(self._constant(value))
            except Unheld as unheld:
                fault = unheld
        if fault is not None and (self._root.exact or not found):
            raise fault
        return found

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
                return self._object(schema, lambda _, part: self._value(part))
            case "string":
                return self._string(schema)
            case _:
                bounds = {key: schema[key] for key in _NUMBER_KEYS if key in schema}
                return self._grammar.json({"type": kind, **bounds})

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = lengths(schema)
        length = f"/(?s:.{{{least},{'' if most is None else most}}})/" if (least, most) != (0, None) else ""
        text = self._grammar.text_until(self._delimiter, [self._delimiter], length)
        return f"{self._grammar.text(self._delimiter)} {text}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        if self._root.exact and (key := next((key for key in ("prefixItems", "uniqueItems") if schema.get(key)), "")):
            raise Unheld(f"has {key}, which calls in the model's format can't be held to")
        least, most = lengths(schema, "Items")
        if most == 0:
            return '"[" "]"'
        item = self._grammar.rule("item", self._value(schema.get("items")))
        more = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'


def _one_of(choices: Iterable[str]) -> str:
    unique = list(dict.fromkeys(choices))
    return unique[0] if len(unique) == 1 else any_of(unique)
