"""Grammar of arguments that are written as named texts: each value by its parameter's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import lark
from .any_key import ANY_KEY, takes_any, with_any_key
from .base import ToolSpec
from .typed_values import STRING, properties_of, resolve, types_of

_DEFINITIONS = ("$defs", "definitions")


class ValueGrammar:
    """Grammar of the values in a format. `end` is the text behind a value; a text contains none of `markers`, at which
    the parser ends a value."""

    def __init__(self, grammar: lark.Grammar, end: str, markers: Sequence[str]) -> None:
        self._grammar = grammar
        self._end = end
        self._markers = markers

    def parameters(self, tool: ToolSpec, write: Callable[[str, str], str]) -> str:
        """Return the expression of a tool's parameters in the order of its schema, optional ones perhaps left out, or
        of any parameters. `write` joins a parameter's name and the expression of its value with `end`."""
        root = tool.parameters
        if tool.text_grammar:
            return write("input", f"{self._grammar.nested(tool.text_grammar)} {self._grammar.text(self._end)}")
        if takes_any(tool):
            return f"({with_any_key(write(ANY_KEY, self.value({}, root)), self._grammar)})*"
        required = [key for key in root.get("required", ()) if isinstance(key, str)]
        properties = {**properties_of(tool), **{key: {} for key in required if key not in properties_of(tool)}}
        parts = [
            write(key, self.value(schema, root)) + ("" if key in required else "?")
            for key, schema in properties.items()
        ]
        return " ".join(parts) or '""'

    def value(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the expression of a value and the `end` behind it. `root` has the definitions that it refers to."""
        found = resolve(schema, root)
        types, end = types_of(found, root), self._grammar.text(self._end)
        if (options := _options(found)) is not None:
            return f"{lark.any_of(map(_written, options))} {end}"
        if types and STRING not in types:
            definitions = {key: root[key] for key in _DEFINITIONS if key in root}
            return f"{self._grammar.json({**definitions, **found})} {end}"
        least, most = (found.get("minLength", 0), found.get("maxLength", "")) if types == (STRING,) else (0, "")
        length = f"/(?s:.{{{least},{most}}})/" if (least, most) != (0, "") else ""
        return self._grammar.text_until(self._end, self._markers, length)


def _options(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) and schema["enum"] else None


def _written(value: Any) -> str:
    return lark.literal(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
