"""Grammar of arguments that are written as named texts: each value by its parameter's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import lark
from .any_key import ANY_KEY, repeated, takes_any, with_any_key
from .base import ToolSpec
from .schema_branches import SchemaRoot, Unheld, lengths, type_of, types_in
from .typed_values import STRING, to_json, types_of_parameters

Writer = Callable[[str, str, bool], str]
"""Joins a parameter's name and the expression of its value with the end, of a string where the flag is set."""

_BEGINS = {"array": r"\[", "object": r"\{", "integer": "[0-9-]", "number": "[0-9-]"}
_WORDS = {"boolean": "true|false|True|False", "null": "null|None"}
_SPACE = r"[\s\x1c-\x1f]*"
_QUOTED = r"\x22([^\x22\\]|\\.)*\x22"
_NUMBERS = {"integer": r"/-?(0|[1-9][0-9]{0,14})/", "number": r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,6})?/"}
_LITERALS = {"boolean": ('"true"', '"false"'), "null": ('"null"',)}


@dataclass
class _Choices:
    """Values that a schema allows: listed ones, texts by their lengths, and others by schemas. `open`: any at all."""

    values: list[Any] = field(default_factory=list)
    texts: list[tuple[int, int | None]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    open: bool = False
    types: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        """Whether all values of a JSON type are allowed."""
        if name == "null" and None in self.values:
            return True
        return any(
            other.keys() == {"type"} and {name, "number" if name == "integer" else name} & {*other["type"]}
            for other in self.others
        )


class ValueGrammar:
    """Grammar of the values in a format. `end` is the text behind a value; a text contains none of `markers`, at which
    the parser ends a value. `declares`: each value says whether it is a string, so that no type has to tell."""

    def __init__(self, grammar: lark.Grammar, end: str, markers: Sequence[str], *, declares: bool = False) -> None:
        self._grammar = grammar
        self._end = end
        self._markers = markers
        self._declares = declares

    def parameters(self, tool: ToolSpec, write: Writer) -> str:
        """Return the expression of a tool's parameters in the order of its schema, optional ones perhaps left out, or
        of any parameters. Raises Unheld for a strict tool with a schema that can't be held."""
        if tool.text_grammar:
            return write("input", f"{self._grammar.nested(tool.text_grammar)} {self._grammar.text(self._end)}", True)
        root = SchemaRoot(tool.parameters, exact=tool.strict)
        types = types_of_parameters(SchemaRoot(tool.parameters))
        return _one_of(self._members(branch, root, types, write) for branch in objects_of(tool, root, self._grammar))

    def _members(
        self, branch: Mapping[str, Any], root: SchemaRoot, types: Mapping[str, Sequence[str]], write: Writer
    ) -> str:
        if takes_any(branch):
            value = self._value(ANY_KEY, branch.get("additionalProperties", {}), root, (), write)
            return repeated(with_any_key(value, self._grammar), "", branch)
        required = branch.get("required", ())
        parts = [
            self._value(key, schema, root, types.get(key, ()), write) + ("" if key in required else "?")
            for key, schema in members_of(branch).items()
        ]
        return " ".join(parts) or '""'

    def _value(self, key: str, schema: Any, root: SchemaRoot, types: Sequence[str], write: Writer) -> str:
        """Return the expression of a parameter. `types` are those by which its value is read."""
        try:
            return self._held(key, schema, root, types, write)
        except Unheld as fault:
            give_up(fault, key, root, self._grammar)
            return self._open(key, write)

    def _held(self, key: str, schema: Any, root: SchemaRoot, types: Sequence[str], write: Writer) -> str:
        found = _choices(root.branches(schema))
        if found.open:
            return self._open(key, write)
        if self._declares:
            texts = self._texts([value for value in found.values if isinstance(value, str)], found, root)
            others = self._json([value for value in found.values if not isinstance(value, str)], found, schema, root)
            parts = [write(key, part, flag) for part, flag in ((texts, True), (others, False)) if part]
        elif found.types == types == (STRING,):
            parts = [write(key, part, True) for part in [self._texts(found.values, found, root)] if part]
        elif STRING not in found.types:
            parts = [write(key, self._json(found.values, found, schema, root), False)]
        else:
            parts = [write(key, self._mixed(found, types, root), True)]
        if not parts or parts == [""]:
            raise Unheld("has no value that calls in the model's format can have")
        return _one_of(parts)

    def _open(self, key: str, write: Writer) -> str:
        """Return the expression of a parameter with any value."""
        text = write(key, self._grammar.text_until(self._end, self._markers), True)
        if not self._declares:
            return text
        return _one_of((text, write(key, f"{self._grammar.json({})} {self._grammar.text(self._end)}", False)))

    def _texts(self, values: Sequence[str], found: _Choices, root: SchemaRoot) -> str:
        """Return the expression of strings that are written and read as they are; "" if there are none."""
        literals = [lark.literal(value) for value in values if self._is_read(value, value, root)]
        if not found.texts:
            return f"{lark.any_of(literals)} {self._grammar.text(self._end)}" if literals else ""
        return self._until(self._grammar.text_without(self._markers, _length(found.texts)), literals)

    def _json(self, values: Sequence[Any], found: _Choices, schema: Any, root: SchemaRoot) -> str:
        """Return the expression of values that are no strings, as JSON; "" if there are none."""
        parts = list(map(_json_literal, values))
        if found.others and STRING not in found.types and not found.values:
            parts = [self._grammar.json(root.alone(schema))]
        else:
            parts += [self._grammar.json(root.alone(other)) for other in found.others]
        return f"{_one_of(parts)} {self._grammar.text(self._end)}" if parts else ""

    def _mixed(self, found: _Choices, types: Sequence[str], root: SchemaRoot) -> str:
        """Return the expression of values among which are strings, and which are read by `types`: what reads as JSON
        of one of them is no string."""
        literals, others = self._written(found.values, types, root), list[str]()
        for other in found.others:
            plain = [name for name in other["type"] if other.keys() == {"type"} and name not in ("array", "object")]
            literals += [literal for name in plain for literal in _LITERALS.get(name, (_NUMBERS.get(name, ""),))]
            if rest := [name for name in other["type"] if name not in plain]:
                others.append(self._grammar.json(root.alone({**other, "type": rest})))
        if not found.texts:
            parts = [*literals, *others]
            return f"{_one_of(parts)} {self._grammar.text(self._end)}" if parts else ""
        length, without = _length(found.texts), _no_string(found, types)
        terms = " & ".join(filter(None, (length, without and f"~/(?s:{_SPACE}({without}){_SPACE})/")))
        text = self._until(self._grammar.text_without(self._markers, terms), literals if terms else ())
        return _one_of((text, *(f"{other} {self._grammar.text(self._end)}" for other in others)))

    def _until(self, terminal: str, literals: Iterable[str]) -> str:
        """Return the expression of a terminal of texts or of literals, with the end behind it. They are one terminal,
        as the lexer can't go back to a literal that begins a text."""
        parts = list(dict.fromkeys((terminal, *literals)))
        whole = terminal if len(parts) == 1 else self._grammar.terminal("VALUE", " | ".join(parts))
        return self._grammar.until(self._end, whole)

    def _written(self, values: Iterable[Any], types: Sequence[str], root: SchemaRoot) -> list[str]:
        """Return literals of values, each as itself or in quotes, so that it is read as what it is."""
        found = []
        for value in values:
            quoted = json.dumps(value, ensure_ascii=False)
            texts = (value, quoted) if isinstance(value, str) else (quoted,)
            read = [text for text in texts if _reads_as(text, types, value)]
            if self._is_read(read[0] if read else None, value, root):
                found.append(lark.literal(read[0]))
        return found

    def _is_read(self, text: str | None, value: Any, root: SchemaRoot) -> bool:
        """Whether the parser reads a text to its end. Raises Unheld instead where the schema has to be held exactly."""
        whole = "" if text is None else text + self._end
        held = text is not None and not any(0 <= whole.find(marker) < len(text) for marker in self._markers)
        if not held and root.exact:
            raise Unheld(f"lists {value!r}, which can't be written in the model's format")
        return held


def objects_of(tool: ToolSpec, root: SchemaRoot, grammar: lark.Grammar) -> list[dict[str, Any]]:
    """Return the plain schemas of a tool's arguments. Where they can't be held, they are what the schema itself lists;
    for a strict tool raises Unheld instead."""
    try:
        return root.objects()
    except Unheld as fault:
        give_up(fault, "", root, grammar)
    return [{key: tool.parameters[key] for key in ("properties", "required") if tool.parameters.get(key)}]


def give_up(fault: Unheld, key: str, root: SchemaRoot, grammar: lark.Grammar) -> None:
    """Note that a parameter's value is free, or, where a schema has to be held exactly, raise Unheld with its name."""
    if root.exact or fault.parameter:
        raise Unheld(fault.message, fault.parameter or key)
    grammar.unheld.append(f"{key} {fault.message}".lstrip())


def members_of(branch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of an object's properties by name, also of those that are only required, without those that
    have no value."""
    properties = {key: schema for key, schema in branch.get("properties", {}).items() if schema is not False}
    rest = [key for key in branch.get("required", ()) if isinstance(key, str) and key not in properties]
    return {**properties, **dict.fromkeys(rest, branch.get("additionalProperties") or {})}


def _choices(branches: Sequence[Mapping[str, Any]]) -> _Choices:
    found = _Choices(types=types_in(branches))
    found.open = not found.types
    for branch in branches:
        if "enum" in branch:
            found.values += branch["enum"]
            continue
        if STRING in branch["type"]:
            found.texts.append(lengths(branch))
        if rest := tuple(name for name in branch["type"] if name != STRING):
            found.others.append({**{key: value for key, value in branch.items() if not _of_strings(key)}, "type": rest})
    return found


def _of_strings(key: str) -> bool:
    return key in ("minLength", "maxLength", "pattern", "format")


def _length(texts: Sequence[tuple[int, int | None]]) -> str:
    """Return the regular expression of texts with one of these lengths; "" for any."""
    if (0, None) in texts:
        return ""
    ranges = "|".join(f".{{{least},{'' if most is None else most}}}" for least, most in dict.fromkeys(texts))
    return f"/(?s:{ranges})/"


def _no_string(found: _Choices, types: Sequence[str]) -> str:
    """Return the regular expression of texts that are read as a value which is no string and is not allowed, or as a
    string in quotes that may be too short."""
    taken = [name for name in (types or (*_BEGINS, *_WORDS)) if name != STRING and not found.allows(name)]
    parts = [f"{_BEGINS[name]}.*" for name in taken if name in _BEGINS]
    parts += [f"{_BEGINS[name]}.*" for name in ("array", "object") if name in types and name not in taken]
    parts += [_WORDS[name] for name in taken if name in _WORDS]
    if any(least for least, _ in found.texts):
        parts.append(_QUOTED)
    return "|".join(dict.fromkeys(parts))


def _reads_as(text: str, types: Sequence[str], value: Any) -> bool:
    read = json.loads(to_json(text, types))
    return type_of(read) == type_of(value) and bool(read == value)


def _json_literal(value: Any) -> str:
    return lark.literal(json.dumps(value, ensure_ascii=False))


def _one_of(parts: Iterable[str]) -> str:
    unique = list(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else lark.any_of(unique)
