"""Readers of calls written as Python, `name(key=value, ...)`, whose keyword arguments become JSON text."""

from __future__ import annotations

import re

from . import json_call
from .base import CallContext
from .json_text import quote_piece, take_string
from .python_text import pass_value
from .scanner import Scanner, Steps

_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"[^\n=,(){}'\"]*")


def pass_call(context: CallContext, *, suffix: str = "") -> Steps[None]:
    """Read one call. `suffix` is cut off its name. Raises Mismatch for other text, and for a positional argument."""
    scan, out = context.scan, context.out
    name = yield from scan.take_run(_NAME)
    if not name:
        scan.fail("expected the name of a function")
    yield from scan.expect("(")
    out.call_start(name.removesuffix(suffix))
    yield from scan.skip_space()
    separator = "{"
    while (yield from scan.accept(")")) is None:
        key = yield from _take_key(scan)
        out.arguments(f'{separator}"{quote_piece(key)}": ')
        yield from pass_value(scan, out.arguments)
        separator = ", "
        yield from scan.skip_space()
        if (yield from scan.expect(",", ")")) == ")":
            break
        yield from scan.skip_space()
    out.arguments("{}" if separator == "{" else "}")
    out.call_end()


def pass_calls(context: CallContext, closing: str = "]") -> Steps[None]:
    """Read calls with commas between them, up to and with `closing`."""
    scan = context.scan
    while True:
        yield from scan.skip_space()
        yield from pass_call(context)
        yield from scan.skip_space()
        if (yield from scan.expect(",", closing)) == closing:
            return


def pass_list(context: CallContext) -> Steps[None]:
    """Read a list of calls behind its opening bracket: as Python, or as JSON objects. Raises Mismatch for another."""
    yield from context.scan.skip_space()
    if (yield from context.scan.peek()) == "{":
        yield from json_call.pass_calls(context)
    else:
        yield from pass_calls(context)


def _take_key(scan: Scanner) -> Steps[str]:
    """Read the name of an argument and the sign behind it. Names may have spaces and brackets, or stand in quotes."""
    first = yield from scan.peek()
    key = None
    if first == '"':
        key = yield from take_string(scan)
    elif first != "[":
        key = (yield from scan.take_run(_KEY)).rstrip() or None
    yield from scan.skip_space()
    if key is None or (yield from scan.accept("=")) is None:
        scan.fail("expected a keyword argument")
    yield from scan.skip_space()
    return key
