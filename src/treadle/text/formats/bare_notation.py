"""Incremental reader of Gemma's notation of objects, which passes them on as JSON text.

Keys are bare, and strings stand between two delimiters instead of quotes: `{city:<escape>Paris<escape>,days:3}`. What
stands between two delimiters is taken as it is: it has no escapes. A bare value that is no number and no literal is a
string.
"""

from __future__ import annotations

import re

from .json_text import Sink, quote_piece, take_string
from .scanner import Markers, Scanner, Steps

_KEY = re.compile(r"""[^:{}\[\],"<]*""")
_WORD = re.compile(r"[^{}\[\],<]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}


class BareNotation:
    """The notation with `delimiter` around strings."""

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        self._end_of_string = Markers(delimiter)

    def pass_object(self, scan: Scanner, sink: Sink) -> Steps[None]:
        """Pass one object to `sink` as JSON text. Raises Mismatch where the text is no object of this notation."""
        yield from scan.skip_space()
        if (yield from scan.peek()) != "{":
            scan.fail("expected the arguments of a call in braces")
        stack: list[str] = []
        while True:
            entered = yield from self._pass_value(scan, sink, stack)
            if not entered and not (yield from self._to_next_value(scan, sink, stack)):
                return

    def _pass_value(self, scan: Scanner, sink: Sink, stack: list[str]) -> Steps[bool]:
        """Pass a scalar, or enter an object or array. Return whether a value of it comes next."""
        yield from scan.skip_space()
        first = yield from scan.peek()
        if first not in _CLOSING:
            yield from self._pass_scalar(scan, sink)
            return False
        sink(scan.advance(1))
        stack.append(_CLOSING[first])
        yield from scan.skip_space()
        if (yield from scan.peek()) == stack[-1]:
            return False
        yield from self._pass_key(scan, sink, stack[-1])
        return True

    def _to_next_value(self, scan: Scanner, sink: Sink, stack: list[str]) -> Steps[bool]:
        """Go from the end of a value to the next one. Return False at the end of the outermost object."""
        while stack:
            yield from scan.skip_space()
            mark = yield from scan.peek()
            if mark == stack[-1]:
                sink(scan.advance(1))
                stack.pop()
            elif mark == ",":
                scan.advance(1)
                sink(", ")
                yield from self._pass_key(scan, sink, stack[-1])
                return True
            else:
                scan.fail(f"expected ',' or '{stack[-1]}' in the arguments")
        return False

    def _pass_key(self, scan: Scanner, sink: Sink, closing: str) -> Steps[None]:
        """Pass the key of an object's next value; an array's has none."""
        if closing == "]":
            return
        yield from scan.skip_space()
        if (yield from scan.accept(self._delimiter)):
            key, _ = yield from scan.take_until(self._end_of_string)
        elif (yield from scan.peek()) == '"':
            key = yield from take_string(scan)
        else:
            key = (yield from scan.take_run(_KEY)).strip()
        yield from scan.skip_space()
        yield from scan.expect(":")
        sink(f'"{quote_piece(key)}": ')

    def _pass_scalar(self, scan: Scanner, sink: Sink) -> Steps[None]:
        if (yield from scan.accept(self._delimiter)):
            yield from self._pass_string(scan, sink)
        elif (yield from scan.peek()) == '"':
            sink(f'"{quote_piece((yield from take_string(scan)))}"')
        else:
            word = (yield from scan.take_run(_WORD)).strip()
            if not word:
                scan.fail("expected a value in the arguments")
            sink(_LITERALS.get(word) or (word if _NUMBER.fullmatch(word) else f'"{quote_piece(word)}"'))

    def _pass_string(self, scan: Scanner, sink: Sink) -> Steps[None]:
        sink('"')
        if (yield from scan.pass_until(self._end_of_string, lambda text: sink(quote_piece(text)))) is None:
            scan.fail(f"expected {self._delimiter!r} at the end of a string")
        sink('"')
