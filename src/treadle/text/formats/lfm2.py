"""LFM2 format: calls as a list in Python between two special tokens.

Source: chat templates of LiquidAI/LFM2-1.2B and LFM2.5 (llama.cpp, models/templates/LFM2.5-8B-A1B.jinja). A system
prompt may ask for JSON instead: then the list has objects with a name and arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import json_call, lark
from .base import CallContext, ToolFormat, ToolSpec
from .python_call import pass_call, pass_list
from .python_grammar import python_calls
from .scanner import Steps

CALLS, CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(ToolFormat):
    """`<|tool_call_start|>[NAME(key="text", other=3)]<|tool_call_end|>`."""

    name = "lfm2"
    text_grammars = False
    starts = (CALLS,)
    special = (CALLS_END,)
    one_block = True

    def detect(self, template: str) -> bool:
        return CALLS in template or "<|tool_list_start|>" in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        yield from scan.skip_space()
        if (yield from scan.peek()) == "{":
            yield from json_call.pass_call(context)
        elif (yield from scan.accept("[")):
            yield from self._read_list(context)
        else:
            yield from pass_call(context)
        yield from scan.skip_closing(CALLS_END)

    def _read_list(self, context: CallContext) -> Steps[None]:
        yield from context.scan.skip_space()
        if (yield from context.scan.accept("]")) is None:
            yield from pass_list(context)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        calls = python_calls(tools, grammar, several=several)
        return f'{grammar.text(CALLS)} "[" {calls} "]" {grammar.text(CALLS_END)}'
