"""Grammars in llguidance's Lark dialect, written by parts: literals, special tokens, JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from .json_lark import in_json

SchemaWriter = Callable[[Mapping[str, Any]], str]
"""Returns the text of a JSON schema behind Lark's `%json`."""


class Parameters(Protocol):
    """Parameters of a tool: their JSON schema, and the grammar of the one that is a text."""

    @property
    def parameters(self) -> Mapping[str, Any]: ...
    @property
    def text_grammar(self) -> str: ...


def plain_schema(schema: Mapping[str, Any]) -> str:
    """Write a JSON schema as it is."""
    return json.dumps(schema)


def literal(text: str) -> str:
    """Return a Lark string literal."""
    return json.dumps(text, ensure_ascii=False) if text else '""'


def quoted(text: str) -> str:
    """Return a Lark literal of a JSON string."""
    return literal(json.dumps(text, ensure_ascii=False))


def regex_of(text: str) -> str:
    """Return a text as a part of a Lark regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n").replace("\\ ", " ").replace('"', r"\x22")


def any_of(expressions: Iterable[str]) -> str:
    """Return a Lark expression of one of several."""
    return "(" + " | ".join(expressions) + ")"


class Grammar:
    """A grammar under construction. `special` are the ids of the vocabulary's special tokens by text. To `unheld` it
    adds, by the names of tools, why values are free that a tool's schema restricts."""

    def __init__(
        self, special: Mapping[str, int], schema: SchemaWriter, unheld: dict[str, list[str]] | None = None
    ) -> None:
        self._ids = special
        self._schema = schema
        self._names: dict[tuple[str, str, str], str] = {}
        self._recursive: dict[str, str] = {}
        self._unheld = {} if unheld is None else unheld
        longest_first = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def text(self, text: str) -> str:
        """Return the expression of a fixed text. Special tokens in it are written as tokens."""
        return " ".join(map(self._part, self._parts(text)))

    def begins_with_token(self, text: str) -> bool:
        """Whether the beginning of a text is a special token."""
        return self._parts(text)[0] in self._ids

    def leave_free(self, tool: str, reason: str) -> None:
        """Note why values of a tool are free."""
        self._unheld.setdefault(tool, []).append(reason)

    def _parts(self, text: str) -> list[str]:
        return [part for part in (self._split.split(text) if self._split else [text]) if part]

    def _part(self, part: str) -> str:
        return f"<[{self._ids[part]}]>" if part in self._ids else literal(part)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of JSON text of a schema."""
        return self.rule("json", f"%json {self._schema(schema)}")

    def arguments(self, tool: Parameters) -> str:
        """Return the expression of the arguments of a tool's calls: JSON text of an object."""
        escaped = in_json(tool.text_grammar) if tool.text_grammar else None
        if escaped is None:
            return self.json({**tool.parameters, "type": "object"})
        return " ".join((literal('{"input": "'), self.nested(escaped), literal('"}')))

    def nested(self, grammar: str) -> str:
        """Return the expression of a Lark grammar with names of its own."""
        return self.rule("nested", f"%lark {{\n{grammar}\n}}")

    def rule(self, prefix: str, expression: str, options: str = "") -> str:
        """Add a rule and return its name. Equal rules are one. `options` stand behind the name, such as "[lazy]"."""
        return self._add(prefix.lower(), expression, options)

    def terminal(self, prefix: str, expression: str) -> str:
        """Add a terminal, a regular expression, and return its name. Equal terminals are one."""
        return self._add(prefix.upper(), expression, "")

    def recursive(self, prefix: str, make: Callable[[str], str]) -> str:
        """Add a rule that may refer to itself: `make` returns its expression from its name. Return the name."""
        name = f"{prefix}_{len(self._names)}"
        key = (prefix, "", f"#{name}")
        self._names[key] = name
        self._recursive[name] = '""'  # where `make` fails
        self._recursive[name] = make(name)
        return name

    def separated(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the expression of `parts` in their order with a separator between them. Each is an expression and
        whether it is required; the others may be left out."""
        between = literal(separator)
        first, rest = '""', '""'
        for part, required in reversed(parts):
            begun = self.rule("parts", f"{part} {rest}")
            first = begun if required else self.rule("parts", f"{begun} | {first}")
            rest = self.rule("parts", f"{between} {begun}" if required else f"({between} {part})? {rest}")
        return first

    def text_until(self, end: str, markers: Iterable[str], more: str = "") -> str:
        """Return the expression of any text that contains none of `markers`, with `end` behind it. `more` is a regular
        expression of Lark that it matches too."""
        return self.until(end, self.text_without(markers, more))

    def text_without(self, markers: Iterable[str], more: str = "") -> str:
        """Add a terminal of texts that contain none of `markers`, and match `more`. Return its name."""
        content = f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(regex_of, markers))})(?s:.*)/"
        return self.terminal("TEXT", content + (f" & {more}" if more else ""))

    def until(self, end: str, terminal: str) -> str:
        """Return the expression of a terminal of texts, with `end` behind it."""
        before, *tokens = [self._part(part) for part in self._parts(end)]
        if before.startswith("<"):
            return " ".join((terminal, before, *tokens))
        until = self.terminal("UNTIL", f"{terminal} {before}")
        return " ".join((until, *tokens)) if tokens else self.rule("text", until, "[lazy]")

    def _add(self, prefix: str, expression: str, options: str) -> str:
        key = (prefix, options, expression)
        return self._names.setdefault(key, f"{prefix}_{len(self._names)}")

    def render(self, start: str) -> str:
        """Return the grammar's text, beginning with the expression `start`."""
        rules = (
            f"{name}{options}: {self._recursive.get(name, rule)}" for (_, options, rule), name in self._names.items()
        )
        return "\n".join([f"start: {start}", *rules])
