"""Reader of a call written as a JSON object with a name and arguments, as most formats do."""

from __future__ import annotations

import json

from .base import CallContext
from .json_text import pass_object, skip_space, take_string, take_value
from .scanner import Scanner, Steps

NAME_KEYS = ("name", "function", "tool_name")
OTHER_KEYS = (*NAME_KEYS, "id", "type", "tool_call_id")
ARGUMENT_KEYS = ("arguments", "parameters")


def pass_call(context: CallContext, *, end: str = "", opened: bool = False) -> Steps[None]:
    """Read one call, an object with `name` and `arguments` (or `function`, `parameters`) in any order, and perhaps an
    `id`. Arguments are passed on as they come once the name is known. They may be missing, null, or a string that holds
    JSON. Where the closing brace is missing, `end` closes the object and is consumed. `opened`: the opening brace was
    consumed. Raises Mismatch for other text.
    """
    scan, call = context.scan, _Call(context)
    if not opened:
        yield from scan.expect("{")
    closing = ("}", end) if end else ("}",)
    while True:
        yield from skip_space(scan)
        key = yield from take_string(scan)
        yield from skip_space(scan)
        yield from scan.expect(":")
        yield from skip_space(scan)
        yield from call.read_member(key)
        yield from skip_space(scan)
        if (yield from scan.expect(",", *closing)) != ",":
            break
    call.finish()


def pass_calls(context: CallContext) -> Steps[None]:
    """Read calls in a JSON array whose opening bracket was consumed."""
    scan = context.scan
    while True:
        yield from skip_space(scan)
        yield from pass_call(context)
        yield from skip_space(scan)
        if (yield from scan.expect(",", "]")) == "]":
            return


class _Call:
    """A call that is being read."""

    def __init__(self, context: CallContext) -> None:
        self._scan = context.scan
        self._out = context.out
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: str | None = None  # those that came before the name
        self._complete = False

    def read_member(self, key: str) -> Steps[None]:
        """Read the value of a key. The call is complete with its name and arguments."""
        quoted = (yield from self._scan.peek()) == '"'
        if key in NAME_KEYS and quoted and self._name is None:
            self._name = yield from take_string(self._scan)
            if self._arguments is not None:
                self._write(self._arguments)
        elif key in ARGUMENT_KEYS and self._arguments is None and not self._complete:
            yield from self._read_arguments()
        elif key == "id" and quoted:
            self._id = yield from take_string(self._scan)
        elif self._out.known_tools_only and not self._complete and key not in OTHER_KEYS:
            self._scan.fail(f"a call has no {key[:64]!r}")
        else:
            yield from take_value(self._scan)

    def finish(self) -> None:
        """End the call's object. Raises Mismatch if it had no name."""
        if self._name is None:
            self._scan.fail("the call has no name")
        if not self._complete:
            self._write("{}")

    def _read_arguments(self) -> Steps[None]:
        first = yield from self._scan.peek()
        if first == "{" and self._name is not None:
            self._out.call_start(self._name, self._id)
            yield from pass_object(self._scan, self._out.arguments)
            self._end()
            return
        self._arguments = yield from _take_arguments(self._scan, first)
        if self._name is not None:
            self._write(self._arguments)

    def _write(self, arguments: str) -> None:
        assert self._name is not None
        self._out.call_start(self._name, self._id)
        self._out.arguments(arguments)
        self._end()

    def _end(self) -> None:
        self._complete = True
        self._out.call_end()


def _take_arguments(scan: Scanner, first: str) -> Steps[str]:
    """Consume arguments and return the JSON text of an object."""
    if first == "{":
        return (yield from take_value(scan))
    if first == '"':
        text = yield from take_string(scan)
    else:
        text = yield from take_value(scan)
    if text.strip() in ("", "null"):
        return "{}"
    if not _is_object(text):
        scan.fail("the arguments are no JSON object")
    return text


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
