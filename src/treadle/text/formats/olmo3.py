"""Olmo 3 format: calls in Python on lines of their own, between two markers.

Source: template for allenai/Olmo-3-7B-Instruct (vLLM, examples/tool_chat_template_olmo3.jinja).
"""

from __future__ import annotations

from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .python_call import pass_call
from .python_grammar import python_calls
from .scanner import Steps

CALLS, CALLS_END = "<function_calls>", "</function_calls>"


class Olmo3(ToolFormat):
    """`<function_calls>`, a line `NAME(key="text", other=3)` for each call, `</function_calls>`."""

    name = "olmo3"
    text_grammars = False
    starts = (CALLS,)
    special = (CALLS_END,)
    one_block = True

    def detect(self, template: str) -> bool:
        return CALLS in template and "<invoke" not in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        while not (yield from scan.skip_closing(CALLS_END)) and (yield from scan.peek()):
            yield from pass_call(context)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        calls = python_calls(tools, grammar, several=several, separator="\n")
        begin, end = grammar.text(f"{CALLS}\n"), grammar.text(f"\n{CALLS_END}")
        return f"{begin} {calls} {end}"
