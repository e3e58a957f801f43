"""Format of Cohere's Command R7B and Command A: `<|START_ACTION|>`, a JSON array of calls, `<|END_ACTION|>`.

Source: template of CohereForAI/c4ai-command-r7b-12-2024 for tools (llama.cpp, models/templates). A call's
`tool_call_id` counts the calls of a conversation; the template makes it anew, so it is no id here.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .json_calls import pass_calls
from .scanner import Steps

CALLS, CALLS_END = "<|START_ACTION|>", "<|END_ACTION|>"


class CommandR(ToolFormat):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": NAME, "parameters": {...}}, ...]<|END_ACTION|>`."""

    name = "command_r"
    starts = (CALLS,)
    special = (CALLS_END,)
    one_block = True

    def detect(self, template: str) -> bool:
        return CALLS in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        yield from context.scan.skip_space()
        yield from pass_calls(context)
        yield from context.scan.skip_closing(CALLS_END)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        head, middle = lark.literal('{"tool_call_id": "'), lark.literal('", "tool_name": ')
        parameters = lark.literal(', "parameters": ')
        bodies = (f"{lark.quoted(tool.name)} {parameters} {grammar.arguments(tool)}" for tool in tools)
        call = grammar.rule("call", f'{head} /[0-9]{{1,4}}/ {middle} {lark.any_of(bodies)} "}}"')
        begin, end = grammar.text(f"{CALLS}[\n    "), grammar.text(f"\n]{CALLS_END}")
        more = f'(",\\n    " {call})*' if several else ""
        return f"{begin} {call} {more} {end}"
