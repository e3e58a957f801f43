"""Arguments that a model writes as named texts, not as JSON: built into JSON text by the parameters' declared types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from .base import CallContext, ToolSpec
from .json_text import pass_value, quote_piece
from .scanner import Markers, Mismatch, Scanner, Steps
from .schema_branches import SchemaRoot, Unheld, types_in

STRING = "string"
_LONG = 1 << 16  # characters of a schema whose types are not kept
_QUOTE_OR_OTHER = re.compile(r'["\\]|[^"\\]+')


def parameter_types(tools: Iterable[ToolSpec]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the JSON types of each tool's parameters, for `ReaderSetup.types`; () where the schema leaves it open."""
    return {tool.name: types_of_tool(tool) for tool in tools}


def types_of_tool(tool: ToolSpec) -> dict[str, tuple[str, ...]]:
    """Return the JSON types of a tool's parameters, as `parameter_types`."""
    text = json.dumps(tool.parameters)
    return dict(_types_by_text(text) if len(text) < _LONG else types_of_parameters(SchemaRoot(tool.parameters)))


@lru_cache(maxsize=256)
def _types_by_text(schema: str) -> dict[str, tuple[str, ...]]:
    return types_of_parameters(SchemaRoot(json.loads(schema)))


def types_of_parameters(root: SchemaRoot) -> dict[str, tuple[str, ...]]:
    """Return the JSON types of all parameters; () where their schemas leave it open. Those of a schema that can't be
    taken apart are the ones that its parts name."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for branch in _objects(root):
        for key, schema in branch.get("properties", {}).items():
            found.setdefault(str(key), []).append(_types(schema, root))
    return {key: tuple(dict.fromkeys(chain(*types))) if all(types) else () for key, types in found.items()}


def _objects(root: SchemaRoot) -> list[dict[str, Any]]:
    try:
        return root.objects()
    except (Unheld, RecursionError):
        return [root.own()]


def _types(schema: Any, root: SchemaRoot) -> tuple[str, ...]:
    try:
        return types_in(root.branches(schema))
    except (Unheld, RecursionError):
        return root.types(schema)


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
            text, marker = yield from _take_value(self._scan, markers, types)
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


def _take_value(scan: Scanner, markers: Markers, types: Sequence[str]) -> Steps[tuple[str, str]]:
    """Consume a value's text and the marker behind it. Markers inside JSON's strings belong to it where `types` have no
    string, or where the text begins as an object or an array of them does."""
    parts: list[str] = []
    quotes = _QuoteTracker()
    while True:
        text, marker = yield from scan.take_until(markers)
        parts.append(text)
        quotes.feed(text)
        if not quotes.inside or not types or (STRING in types and not _is_nested(parts[0], types)):
            return "".join(parts), marker
        parts.append(marker)
        quotes.feed(marker)


def _is_nested(text: str, types: Sequence[str]) -> bool:
    return {"{": "object", "[": "array"}.get(text.lstrip()[:1]) in types


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
