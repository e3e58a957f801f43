"""Grammar of arguments that are written as named texts: each value by its parameter's JSON schema."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import lark
from .any_key import ANY_KEY, repeated, takes_any, with_any_key
from .base import ToolSpec
from .integer_ranges import integers_between
from .schema_branches import SchemaRoot, Unheld, lengths, type_of, types_in
from .typed_values import STRING, to_json, types_of_tool

Writer = Callable[[str, str, bool], str]
"""Joins a parameter's name and the expression of its value with the end, of a string where the flag is set."""

MAX_LENGTH = 16
"""Greatest length that texts are held to whose end is no special token. The lexer finds the end in the same terminal
that counts, in a state for each character and each part of the end: for longer ones a search for the end of a call
takes seconds, up to an error of the lexer."""

MANY = 64
"""Literals from which on they are one terminal."""

_BEGINS = {"array": r"\[", "object": r"\{", "integer": "[0-9-]", "number": "[0-9-]"}
_WHOLE = {
    "integer": "-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?",
}
_WORDS = {"boolean": "true|false|True|False", "null": "null|None"}
_SPACE = r"[\s\x1c-\x1f]*"
_QUOTED = r"\x22([^\x22\\]|\\.)*\x22"
_NUMBERS = {"integer": r"/-?(0|[1-9][0-9]{0,14})/", "number": r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,6})?/"}
_LARGEST = 10**15 - 1
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
        names = {name, "number"} if name == "integer" else {name}
        return any(other.keys() == {"type"} and names & {*other["type"]} for other in self.others)


class ValueGrammar:
    """Grammar of the values in a format. `end` is the text behind a value; a text contains none of `markers`, at which
    the parser ends a value. `declares`: each value says whether it is a string, so that no type has to tell."""

    def __init__(self, grammar: lark.Grammar, end: str, markers: Sequence[str], *, declares: bool = False) -> None:
        self._grammar = grammar
        self._end = end
        self._markers = markers
        self._declares = declares
        self._counts = grammar.begins_with_token(end)

    def parameters(self, tool: ToolSpec, write: Writer) -> str:
        """Return the expression of a tool's parameters in the order of its schema, optional ones perhaps left out, or
        of any parameters. Raises Unheld for a strict tool with a schema that can't be held."""
        if tool.text_grammar:
            return write("input", f"{self._grammar.nested(tool.text_grammar)} {self._grammar.text(self._end)}", True)
        root = SchemaRoot(tool.parameters, exact=tool.strict, tool=tool.name)
        types = types_of_tool(tool)
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
        if (possible := root.types(schema)) and STRING not in possible:
            return write(key, self._whole(schema, root), False)
        found = _choices(root.branches(schema))
        if found.open:
            return self._open(key, write)
        self._limit_lengths(key, found, root)
        if self._declares:
            texts = self._texts([value for value in found.values if isinstance(value, str)], found, root)
            others = self._json([value for value in found.values if not isinstance(value, str)], found, schema, root)
            parts = [write(key, part, flag) for part, flag in ((texts, True), (others, False)) if part]
        elif found.types == types == (STRING,):
            parts = [write(key, part, True) for part in [self._texts(found.values, found, root)] if part]
        elif STRING not in found.types:
            parts = [write(key, self._json(found.values, found, schema, root), False)]
        else:
            parts = [write(key, self._mixed(key, found, types, root), True)]
        if not parts or parts == [""]:
            raise Unheld("has no value that calls in the model's format can have")
        return _one_of(parts)

    def _whole(self, schema: Any, root: SchemaRoot) -> str:
        """Return the expression of a schema's values as JSON. None of them is a string."""
        return f"{self._grammar.json(root.alone(schema))} {self._grammar.text(self._end)}"

    def _limit_lengths(self, key: str, found: _Choices, root: SchemaRoot) -> None:
        """Leave those lengths of texts free that are too long to count. Raises Unheld instead where the schema has to
        be held exactly."""
        if self._counts:
            return
        found.texts, before = list(map(counted, found.texts)), found.texts
        if found.texts != before:
            give_up(too_long(), key, root, self._grammar)

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
            return self._listed(literals) if literals else ""
        return self._until(self._grammar.text_without(self._markers, _length(found.texts)), literals)

    def _json(self, values: Sequence[Any], found: _Choices, schema: Any, root: SchemaRoot) -> str:
        """Return the expression of values that are no strings, as JSON; "" if there are none."""
        parts = list(map(_json_literal, values))
        if found.others and STRING not in found.types and not found.values:
            parts = [self._grammar.json(root.alone(schema))]
        else:
            parts += [self._grammar.json(root.alone(other)) for other in found.others]
        return f"{_one_of(parts)} {self._grammar.text(self._end)}" if parts else ""

    def _mixed(self, key: str, found: _Choices, types: Sequence[str], root: SchemaRoot) -> str:
        """Return the expression of values among which are strings, and which are read by `types`: what reads as JSON
        of one of them is no string. Beside any texts arrays and objects are texts, too, unless the schema has to be
        held exactly: then no text begins as one."""
        literals, others = self._written(found.values, types, root), list[str]()
        begins = dict[str, None]()
        for other in found.others:
            for name in other["type"]:
                one = {**other, "type": (name,)}
                if (written := _plain_literals(name, one, bounded=bool(found.texts))) is not None:
                    literals += written
                elif root.exact or not found.texts:
                    others.append(self._grammar.json(root.alone(one)))
                    begins[name] = None
                elif name in _NUMBERS:
                    literals.append(_NUMBERS[name])
                    begins[name] = None
        if not found.texts:
            parts = [*literals, *others]
            if not others and parts:
                return self._listed(parts)
            return f"{_one_of(parts)} {self._grammar.text(self._end)}" if parts else ""
        if not root.exact and any(name in _NUMBERS for name in begins):
            give_up(Unheld("has limits of numbers beside texts, which can't be held"), key, root, self._grammar)
        length, without = _length(found.texts), _no_string(found, types, begins, exact=root.exact)
        terms = " & ".join(filter(None, (length, without and f"~/(?s:{_SPACE}({without}){_SPACE})/")))
        text = self._until(self._grammar.text_without(self._markers, terms), literals if terms else ())
        return _one_of((text, *(f"{other} {self._grammar.text(self._end)}" for other in others)))

    def _listed(self, literals: Sequence[str]) -> str:
        """Return the expression of one of some literals. Many of them are one terminal: masks and searches take time
        for each expression otherwise."""
        if len(literals) <= MANY:
            return f"{_one_of(literals)} {self._grammar.text(self._end)}"
        return self._grammar.until(self._end, self._grammar.terminal("VALUE", " | ".join(dict.fromkeys(literals))))

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
    own = root.own()
    return [{key: own[key] for key in ("properties", "required") if own.get(key)}]


def give_up(fault: Unheld, key: str, root: SchemaRoot, grammar: lark.Grammar) -> None:
    """Note that a parameter's value is free, or, where a schema has to be held exactly, raise Unheld with its name."""
    if root.exact or fault.parameter:
        raise Unheld(fault.message, fault.parameter or key)
    grammar.leave_free(root.tool, f"{key} {fault.message}".lstrip())


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


def counted(length: tuple[int, int | None]) -> tuple[int, int | None]:
    """Return the least and the greatest length without those that are too long to count."""
    least, most = length
    return least if least <= MAX_LENGTH else 1, most if most is None or most <= MAX_LENGTH else None


def too_long() -> Unheld:
    """Return the error for lengths that are too long to count."""
    return Unheld(f"has a length of over {MAX_LENGTH} characters, which texts in the model's format can't be held to")


def _plain_literals(name: str, schema: Mapping[str, Any], *, bounded: bool) -> tuple[str, ...] | None:
    """Return Lark literals of all values of a type; None for one that has none, or has limits. With `bounded` there are
    some of integers with limits, too."""
    if schema.keys() == {"type"}:
        return _LITERALS.get(name) or ((_NUMBERS[name],) if name in _NUMBERS else None)
    limits = schema.keys() - {"type"}
    if bounded and name == "integer" and limits <= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
        least, most = _least_and_most(schema)
        return (f"/{integers_between(least, most)}/",) if least <= most else ()
    return None


def _least_and_most(schema: Mapping[str, Any]) -> tuple[int, int]:
    """Return the integers with up to 15 digits between which all those are that a schema allows."""
    least = [-_LARGEST, math.ceil(schema.get("minimum", -_LARGEST))]
    most = [_LARGEST, math.floor(schema.get("maximum", _LARGEST))]
    if "exclusiveMinimum" in schema:
        least.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in schema:
        most.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    return max(least), min(most)


def _no_string(found: _Choices, types: Sequence[str], begins: Iterable[str], *, exact: bool) -> str:
    """Return the regular expression of texts that are read as a value which is no string and is not allowed, or as a
    string in quotes that may be too short. With `exact` no text begins as values of the types
    `begins`."""
    taken = [name for name in (types or (*_BEGINS, *_WORDS)) if name != STRING and not found.allows(name)]
    parts = [_WHOLE[name] for name in taken if name in _WHOLE]
    parts += [_WORDS[name] for name in taken if name in _WORDS]
    if exact:
        parts += [f"{_BEGINS[name]}.*" for name in begins]
        parts += [f"{_BEGINS[name]}.*" for name in ("array", "object") if name in types or name in taken]
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
