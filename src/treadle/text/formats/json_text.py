"""Incremental reader of JSON text: passes each piece on as soon as it is known to be valid.

Mistakes that models often make become valid JSON: control characters in strings are escaped, a backslash that escapes
nothing is doubled, and Python's True, False and None become JSON's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ..json_escapes import with_whole_pairs
from .scanner import Scanner, Steps

Sink = Callable[[str], None]

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
HEX = frozenset("0123456789abcdefABCDEF")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}


def skip_space(scan: Scanner) -> Steps[None]:
    """Consume JSON's white space."""
    yield from scan.take_run(_SPACE)


def pass_value(scan: Scanner, sink: Sink) -> Steps[None]:
    """Pass one JSON value to `sink`. Raises Mismatch where the text is no JSON."""
    yield from skip_space(scan)
    first = yield from scan.peek()
    if first in _CLOSING:
        yield from _pass_nested(scan, sink)
    else:
        yield from _pass_scalar(scan, sink, first)


def pass_object(scan: Scanner, sink: Sink) -> Steps[None]:
    """Pass one JSON object to `sink`. Raises Mismatch where the text is no JSON object."""
    yield from skip_space(scan)
    if (yield from scan.peek()) != "{":
        scan.fail("expected a JSON object")
    yield from _pass_nested(scan, sink)


def take_string(scan: Scanner) -> Steps[str]:
    """Consume a JSON string and return its value, as text that UTF-8 has."""
    parts: list[str] = []
    yield from _pass_string(scan, parts.append)
    value = json.loads(with_whole_pairs("".join(parts)))
    assert isinstance(value, str)
    return value


def take_value(scan: Scanner) -> Steps[str]:
    """Consume one JSON value and return its text."""
    parts: list[str] = []
    yield from pass_value(scan, parts.append)
    return "".join(parts)


def pass_word(scan: Scanner, sink: Sink, expected: str) -> Steps[None]:
    """Pass a number, or a literal by JSON's or Python's name. Raises Mismatch, with what was `expected`, for others."""
    word = yield from scan.take_run(_WORD)
    if word in LITERALS:
        sink(LITERALS[word])
    elif NUMBER.fullmatch(word):
        sink(word)
    else:
        scan.fail(f"expected {expected}")


def quote_piece(text: str) -> str:
    """Return `text` as a piece of the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _pass_nested(scan: Scanner, sink: Sink) -> Steps[None]:
    """Pass an object or array. Open brackets are on a stack of its own: depth costs no recursion."""
    stack: list[str] = []
    while True:
        bracket = yield from scan.peek()
        if bracket in _CLOSING:
            sink(scan.advance(1))
            stack.append(_CLOSING[bracket])
            entered = yield from _enter(scan, sink, stack)
        else:
            yield from _pass_scalar(scan, sink, bracket)
            entered = False
        if not entered and not (yield from _to_next_value(scan, sink, stack)):
            return


def _enter(scan: Scanner, sink: Sink, stack: list[str]) -> Steps[bool]:
    """Go to the first value of the object or array that was opened. Return False if it is empty."""
    yield from scan.pass_run(_SPACE, sink)
    if (yield from scan.peek()) == stack[-1]:
        return False
    if stack[-1] == "}":
        yield from _pass_key(scan, sink)
    return True


def _to_next_value(scan: Scanner, sink: Sink, stack: list[str]) -> Steps[bool]:
    """Go from the end of a value, or of what an empty object holds, to the next one. Return False at the end of all."""
    while stack:
        yield from scan.pass_run(_SPACE, sink)
        mark = yield from scan.peek()
        if mark == stack[-1]:
            sink(scan.advance(1))
            stack.pop()
        elif mark == ",":
            sink(scan.advance(1))
            yield from scan.pass_run(_SPACE, sink)
            if stack[-1] == "}":
                yield from _pass_key(scan, sink)
            return True
        else:
            scan.fail(f"expected ',' or '{stack[-1]}' in JSON")
    return False


def _pass_key(scan: Scanner, sink: Sink) -> Steps[None]:
    """Pass a key, its colon, and the space behind it."""
    yield from _pass_string(scan, sink)
    yield from scan.pass_run(_SPACE, sink)
    sink((yield from scan.expect(":")))
    yield from scan.pass_run(_SPACE, sink)


def _pass_scalar(scan: Scanner, sink: Sink, first: str) -> Steps[None]:
    if first == '"':
        yield from _pass_string(scan, sink)
        return
    yield from pass_word(scan, sink, "a JSON value")


def _pass_string(scan: Scanner, sink: Sink) -> Steps[None]:
    sink((yield from scan.expect('"')))
    while True:
        yield from scan.pass_run(_PLAIN, sink)
        char = yield from scan.peek()
        if not char:
            scan.fail("expected the end of a JSON string")
        scan.advance(1)
        if char == "\\":
            yield from _pass_escape(scan, sink)
        else:
            sink(char if char == '"' else quote_piece(char))
        if char == '"':
            return


def _pass_escape(scan: Scanner, sink: Sink) -> Steps[None]:
    r"""Pass the escape whose backslash was consumed. A backslash that escapes nothing is doubled."""
    char = yield from scan.peek()
    if not char:
        scan.fail("expected the end of a JSON string")
    if char == "u":
        scan.advance(1)
        yield from _pass_code_point(scan, sink)
    elif char in '"\\/bfnrt':
        sink("\\" + scan.advance(1))
    else:
        sink("\\\\")


def _pass_code_point(scan: Scanner, sink: Sink) -> Steps[None]:
    digits = ""
    while len(digits) < 4 and (yield from scan.peek()) in HEX:
        digits += scan.advance(1)
    sink(f"\\u{digits}" if len(digits) == 4 else f"\\\\u{digits}")
