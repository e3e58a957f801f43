"""Reader of JSON arguments behind a name, and of arrays of calls; and the grammar of such arrays."""

from __future__ import annotations

from collections.abc import Sequence

from . import json_call
from .base import CallContext, ToolSpec
from .json_text import pass_object
from .lark import Grammar, any_of, literal, quoted
from .scanner import Steps

NAME, ARGUMENTS = literal('{"name": '), literal(', "arguments": ')


def pass_arguments(context: CallContext, end: str = "") -> Steps[None]:
    """Read the arguments of the call that was begun, end the call, and skip `end`. No arguments are an empty object."""
    scan = context.scan
    yield from scan.skip_space()
    if end and (yield from scan.accept(end)):
        context.out.arguments("{}")
        context.out.call_end()
        return
    yield from pass_object(scan, context.out.arguments)
    context.out.call_end()
    if end:
        yield from scan.skip_closing(end)
        scan.forget()


def pass_calls(context: CallContext, *, opened: bool = False) -> Steps[None]:
    """Read an array of calls, or a single call. `opened`: the opening bracket was consumed."""
    scan = context.scan
    if not opened and (yield from scan.accept("[")) is None:
        yield from json_call.pass_call(context)
        return
    yield from scan.skip_space()
    if (yield from scan.accept("]")) is None:
        yield from json_call.pass_calls(context)


def call_objects(tools: Sequence[ToolSpec], grammar: Grammar, *, several: bool, more_keys: str = "") -> str:
    """Return the Lark expression of an array of calls. `more_keys` is that of keys behind the arguments."""
    bodies = (f"{quoted(tool.name)} {ARGUMENTS} {grammar.arguments(tool)}" for tool in tools)
    call = grammar.rule("call", f'{NAME} {any_of(bodies)} {more_keys} "}}"')
    more = f'(", " {call})*' if several else ""
    return f'"[" {call} {more} "]"'
