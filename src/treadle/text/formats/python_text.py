"""Incremental reader of Python literals: passes on their JSON text, strings as they come, the rest when complete."""

from __future__ import annotations

import re

from .json_text import HEX, Sink, pass_word, quote_piece
from .scanner import SPACE, Scanner, Steps

_BRACKETS = {"[": ("[", "]", "]"), "(": ("[", ")", "]"), "{": ("{", "}", "}")}
"""By opening bracket: its JSON, the closing bracket, and that one's JSON."""
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_BEHIND_STRING = ",:)]}"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def pass_value(scan: Scanner, sink: Sink) -> Steps[None]:
    """Pass one literal to `sink` as JSON: a string, number, list, tuple, dict, True, False or None (or JSON's names of
    these). Raises Mismatch for other text."""
    stack: list[tuple[str, str]] = []
    while True:
        char = yield from scan.peek()
        if char in _BRACKETS:
            opening, closing, closing_json = _BRACKETS[char]
            scan.advance(1)
            sink(opening)
            stack.append((closing, closing_json))
            yield from scan.skip_space()
            entered = (yield from scan.peek()) != closing
            if entered and closing == "}":
                yield from _pass_key(scan, sink)
        else:
            yield from _pass_scalar(scan, sink, char)
            entered = False
        if not entered and not (yield from _to_next_value(scan, sink, stack)):
            return


def _to_next_value(scan: Scanner, sink: Sink, stack: list[tuple[str, str]]) -> Steps[bool]:
    """Go from the end of a value to the next one. Return False at the end of all. A comma may stand before a closing
    bracket."""
    while stack:
        closing, closing_json = stack[-1]
        yield from scan.skip_space()
        comma = (yield from scan.accept(",")) is not None
        yield from scan.skip_space()
        if (yield from scan.accept(closing)):
            sink(closing_json)
            stack.pop()
        elif comma:
            sink(", ")
            if closing == "}":
                yield from _pass_key(scan, sink)
            return True
        else:
            scan.fail(f"expected ',' or {closing!r}")
    return False


def _pass_key(scan: Scanner, sink: Sink) -> Steps[None]:
    char = yield from scan.peek()
    if char not in _PLAIN:
        scan.fail("expected a key in quotes")
    yield from _pass_string(scan, sink, char)
    yield from scan.skip_space()
    yield from scan.expect(":")
    yield from scan.skip_space()
    sink(": ")


def _pass_scalar(scan: Scanner, sink: Sink, first: str) -> Steps[None]:
    if first in _PLAIN:
        yield from _pass_string(scan, sink, first)
        return
    yield from pass_word(scan, sink, "a value")


def _pass_string(scan: Scanner, sink: Sink, quote: str) -> Steps[None]:
    """Pass a string. A quote behind which no string can end belongs to it: models, and the templates that they learned
    from, do not escape the quotes in a text (LFM2's does not)."""
    scan.advance(1)
    end = quote * 3 if (yield from scan.accept(quote * 2)) else quote
    sink('"')
    while True:
        yield from scan.pass_run(_PLAIN[quote], lambda text: sink(quote_piece(text)))
        if (yield from scan.accept(end)):
            space = yield from scan.take_run(SPACE)
            if end != quote or (yield from scan.peek()) in _BEHIND_STRING:
                break
            sink(quote_piece(end + space))
            continue
        char = yield from scan.peek()
        if not char:
            scan.fail("expected the end of a string")
        scan.advance(1)
        if char == "\\":
            yield from _pass_escape(scan, sink)
        else:
            sink(quote_piece(char))
    sink('"')


def _pass_escape(scan: Scanner, sink: Sink) -> Steps[None]:
    """Pass the escape whose backslash was consumed. A backslash that escapes nothing stays."""
    char = yield from scan.peek()
    if not char:
        scan.fail("expected the end of a string")
    if char in _HEX_DIGITS:
        scan.advance(1)
        yield from _pass_code_point(scan, sink, char)
    elif char in "\n'\"\\":
        sink(quote_piece(scan.advance(1)) if char != "\n" else scan.advance(1)[:0])
    elif char in _ESCAPES:
        scan.advance(1)
        sink(quote_piece(_ESCAPES[char]))
    else:
        sink("\\\\")


def _pass_code_point(scan: Scanner, sink: Sink, kind: str) -> Steps[None]:
    digits, wanted = "", _HEX_DIGITS[kind]
    while len(digits) < wanted and (yield from scan.peek()) in HEX:
        digits += scan.advance(1)
    code = int(digits, 16) if len(digits) == wanted else -1
    if 0 <= code <= 0x10FFFF:
        sink(quote_piece(chr(code)) if not 0xD800 <= code < 0xE000 else f"\\u{code:04x}")
    else:
        sink(f"\\\\{kind}{digits}")
