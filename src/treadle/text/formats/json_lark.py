"""Lark grammars of texts, rewritten so that they match those texts inside of JSON strings.

Models write a text in JSON, with its quotes, backslashes and control characters escaped. Literals are escaped. Regular
expressions that match such characters become rules of single characters and escapes, as do the terminals that refer to
them: llguidance's lexer decides by one character whether a terminal ends, and all escapes begin alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

_PARTS = re.compile(
    r"(?P<comment>//[^\n]*)"
    r'|(?P<range>"(?:\\.|[^"\\\n])*"\s*\.\.\s*"(?:\\.|[^"\\\n])*")'
    r'|(?P<literal>"(?:\\.|[^"\\\n])*")(?P<fold>i?)'
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)"
    r'|(?P<foreign>%(?!ignore\b)|[<@/"])'
    r"|.",
    re.DOTALL,
)
_UNITS = re.compile(
    r"(?P<open>\((?:\?:)?)|(?P<mark>[)|*+?]|\{\d+(?:,\d*)?\})"
    r"|(?P<unit>\[\^?\]?(?:\\.|[^\]\\\[])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^xupPbBAzZ1-9]|[^\\\[\](){}^$])"
)
_IMPORT = re.compile(r"^[ \t]*%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*$", re.MULTILINE)
_COMMON = {"LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"}
"""Regular expressions of the terminals of Lark's `common` with characters that JSON escapes."""
_AS_THEY_ARE = (
    *("INT", "SIGNED_INT", "DIGIT", "HEXDIGIT", "LETTER", "LCASE_LETTER", "UCASE_LETTER", "WORD", "CNAME"),
    *("NUMBER", "SIGNED_NUMBER", "FLOAT", "SIGNED_FLOAT", "DECIMAL"),
)
_DEFINITION = re.compile(r"^[ \t]*[?!]?(\w+)[ \t]*(?:\.\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_WORDS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|\b([A-Z_][A-Z0-9_]*)\b')
_LAST = re.compile(r"[+*]\)*")
_RULE = "\x00"  # stands before what is no longer a regular expression
_ESCAPED = '"\\\n\t\r\b\f'
"""Characters that are escaped. Other control characters are left out: no text that a person writes has them."""
_UNESCAPED = r"[^\x22\x5c\x00-\x1f]"


class _Unknown(Exception):
    """A part that is not rewritten."""


@lru_cache(maxsize=64)
def in_json(grammar: str) -> str | None:
    """Return the grammar of the JSON strings, without their quotes, whose texts `grammar` matches; None for a grammar
    with parts that are not rewritten."""
    try:
        return _as_rules("".join(_rewritten(grammar)))
    except (_Unknown, ValueError, re.error):
        return None


def _rewritten(grammar: str) -> Iterator[str]:
    place = 0
    for line in _IMPORT.finditer(grammar):
        yield from map(_part, _PARTS.finditer(grammar[place : line.start()]))
        name, place = line[1], line.end()
        if name in _COMMON:
            yield f"{line[2] or name}: {_regex(_COMMON[name])}"
        elif name in _AS_THEY_ARE:
            yield line[0]
        else:
            raise _Unknown
    yield from map(_part, _PARTS.finditer(grammar[place:]))


def _part(part: re.Match[str]) -> str:
    if part["range"] is not None:
        return _regex(_class_of(part["range"]))
    if part["literal"] is not None:
        return _literal(part["literal"], part["fold"])
    if part["regex"] is not None and not part["flags"]:
        return _regex(part["regex"])
    if part["regex"] is not None or part["foreign"] is not None:
        raise _Unknown
    return "" if part["comment"] is not None else part[0]


def _as_rules(grammar: str) -> str:
    """Return the grammar with rules in place of the terminals that are no longer regular expressions."""
    places = [*_DEFINITION.finditer(grammar)]
    ends = [*(place.start() for place in places[1:]), len(grammar)]
    bodies = {place[1]: grammar[place.end() : end] for place, end in zip(places, ends, strict=True)}
    rules = {name for name, body in bodies.items() if name.isupper() and _RULE in body}
    while more := {name for name, body in bodies.items() if name.isupper() and rules & _names(body)} - rules:
        rules |= more
    grammar = _WORDS.sub(lambda word: f"rule_{word[1].lower()}" if word[1] in rules else word[0], grammar)
    if any(_RULE in line or "rule_" in line for line in grammar.splitlines() if "%ignore" in line):
        raise _Unknown
    return grammar.replace(_RULE, "")


def _names(body: str) -> set[str]:
    return {word[1] for word in _WORDS.finditer(body) if word[1]}


def _literal(literal: str, fold: str) -> str:
    text = json.loads(literal)
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    if fold and escaped != text:
        raise _Unknown
    return json.dumps(escaped, ensure_ascii=False) + fold


def _class_of(literals: str) -> str:
    """Return the class of a range of characters, such as `"a".."z"`."""
    first, last = (json.loads(f'"{text}"') for text in re.findall(r'"((?:\\.|[^"\\\n])*)"', literals))
    return f"[{re.escape(first)}-{re.escape(last)}]".replace("/", r"\/")


def _regex(pattern: str) -> str:
    """Return a regular expression, or an expression of rules where it matches characters that JSON escapes."""
    parts, place, escaped = [], 0, False
    while place < len(pattern):
        part = _UNITS.match(pattern, place)
        if part is None or pattern[place : place + 2] == "(?" != part[0][:2]:
            raise _Unknown
        place = part.end()
        if part["unit"] is None:
            parts.append("(" if part["open"] else part[0])
            continue
        unit, has_escapes = _unit(part["unit"], run=_LAST.fullmatch(pattern, place) is not None)
        parts.append(unit)
        escaped = escaped or has_escapes
    return f"{_RULE}({' '.join(parts)})".replace(" {", "{") if escaped else f"/{pattern}/"


def _unit(unit: str, *, run: bool) -> tuple[str, bool]:
    """Return the expression of a class, an escape or a character, and whether it has escapes; with `run` of one or more
    of its characters."""
    matches = re.compile(unit.replace(r"\/", "/"))
    escapes = [_escape(char) for char in _ESCAPED if matches.fullmatch(char)]
    if any(matches.fullmatch(char) for char in map(chr, range(32, 0x180)) if char not in _ESCAPED):
        inner = r"[^\n]" if unit == "." else unit if unit[0] == "[" else f"[{_in_class(unit)}]"
        escapes.append(f"/[{inner}&&{_UNESCAPED}]{'+' if run else ''}/")
    if not escapes:
        raise _Unknown
    return f"({' | '.join(escapes)})", len(escapes) > 1 or escapes[0][0] == '"'


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "-&~^]" else char


def _escape(char: str) -> str:
    """Return the escape of a character in JSON as a literal of Lark."""
    return json.dumps(json.dumps(char)[1:-1])
