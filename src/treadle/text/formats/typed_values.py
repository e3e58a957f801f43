"""Arguments that a model writes as named texts, not as JSON: built into JSON text by the parameters' declared types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .base import CallContext, ToolSpec
from .json_text import pass_value, quote_piece
from .scanner import Markers, Mismatch, Scanner, Steps

STRING = "string"
_QUOTE_OR_OTHER = re.compile(r'["\\]|[^"\\]+')


def parameter_types(tools: Iterable[ToolSpec]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the JSON types of each tool's parameters, for `ReaderSetup.types`; () where the schema leaves it open."""
    return {
        tool.name: {str(key): types_of(schema, tool.parameters) for key, schema in properties_of(tool).items()}
        for tool in tools
    }


def properties_of(tool: ToolSpec) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name."""
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the JSON types that a schema allows; () if it does not say. References are looked up in `root`."""
    return tuple(dict.fromkeys(_types(schema, root, set())))


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> list[str]:
    """Return the types, perhaps repeated. `seen` are schemas that were visited: one may refer to itself."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return []
    seen.add(id(schema))
    if isinstance(declared := schema.get("type"), str | list):
        return [declared] if isinstance(declared, str) else [name for name in declared if isinstance(name, str)]
    if "const" in schema or isinstance(schema.get("enum"), list):
        return [_type_name(value) for value in schema.get("enum", [schema.get("const")])]
    parts = schema.get("anyOf", schema.get("oneOf"))
    found = [_types(part, root, seen) for part in parts] if isinstance(parts, list) else []
    return [name for names in found for name in names] if all(found) else []


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a chain of local references ends at; None where it ends nowhere."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return None
        seen.add(reference)
        schema = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: STRING, list: "array", dict: "object"}
    return names.get(type(value), "null")


def to_json(text: str, types: Sequence[str]) -> str:
    """Return the JSON text of a value that was written as `text`.

    It is JSON if it reads as JSON of one of `types`, and a string otherwise. Without a string among `types` all JSON is
    taken, as the schema allows no text.
    """
    value = _read_json(text.strip())
    if value is not None and (not types or STRING not in types or _type_of_json(value) in types):
        return value
    if value is not None and _type_of_json(value) == "integer" and "number" in types:
        return value
    return f'"{quote_piece(text)}"'


def _read_json(text: str) -> str | None:
    """Return `text` as valid JSON, mended where a model's mistakes can be; None if it is none."""
    scan, parts = Scanner(), list[str]()
    scan.feed(text)
    scan.ended = True
    try:
        for _ in pass_value(scan, parts.append):
            raise AssertionError("a scanner waits for more text behind the end")
    except Mismatch:
        return None
    return "".join(parts) if scan.is_done else None


def _type_of_json(value: str) -> str:
    first = value[0]
    if first in "-0123456789":
        return "number" if any(char in value for char in ".eE") else "integer"
    return {"{": "object", "[": "array", '"': STRING, "n": "null"}.get(first, "boolean")


class ArgumentsBuilder:
    """Builder of the arguments of the call that has just been begun, from named values."""

    def __init__(self, context: CallContext, tool: str) -> None:
        self._scan = context.scan
        self._write = context.out.arguments
        self._types = context.types.get(tool, {})
        self._empty = True

    def pass_text(self, key: str, markers: Markers, types: Sequence[str] | None = None) -> Steps[str]:
        """Read the text of a value up to one of `markers`; return the marker. A string is passed on as it comes, a
        value of another type when it is complete. `types` replaces the declared ones. Raises EndOfAnswer without a
        marker."""
        types = self._types.get(key, ()) if types is None else types
        if tuple(types) != (STRING,):
            text, marker = yield from _take_value(self._scan, markers, json_only=bool(types) and STRING not in types)
            self.add(key, to_json(text, types))
            return marker
        self._write(self._key(key) + '"')
        found = yield from self._scan.pass_until(markers, lambda text: self._write(quote_piece(text)))
        if found is None:
            self._scan.fail(f"expected the end of {key!r}")
        self._write('"')
        return found

    def add(self, key: str, value: str) -> None:
        """Write a value that is JSON text."""
        self._write(self._key(key) + value)

    def end(self) -> None:
        """Write the end of the arguments."""
        self._write("{}" if self._empty else "}")

    def _key(self, key: str) -> str:
        before, self._empty = "{" if self._empty else ", ", False
        return f'{before}"{quote_piece(key)}": '


def _take_value(scan: Scanner, markers: Markers, *, json_only: bool) -> Steps[tuple[str, str]]:
    """Consume a value's text and the marker behind it. With `json_only` markers inside JSON strings belong to it."""
    parts: list[str] = []
    quotes = _QuoteTracker()
    while True:
        text, marker = yield from scan.take_until(markers)
        parts.append(text)
        quotes.feed(text)
        if not (json_only and quotes.inside):
            return "".join(parts), marker
        parts.append(marker)
        quotes.feed(marker)


class _QuoteTracker:
    """Tracker of whether JSON text ends inside a string."""

    def __init__(self) -> None:
        self.inside = False
        self._escaped = False

    def feed(self, text: str) -> None:
        """Read more text."""
        for match in _QUOTE_OR_OTHER.finditer(text):
            if self._escaped or match.group() not in '"\\':
                self._escaped = False
            elif match.group() == '"':
                self.inside = not self.inside
            else:
                self._escaped = self.inside
