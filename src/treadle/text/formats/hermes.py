"""Hermes format, also of Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .json_call import pass_call
from .scanner import Steps

ARGUMENTS = lark.literal(', "arguments": ')


class Hermes(ToolFormat):
    """JSON calls, each between `<tool_call>` and `</tool_call>`."""

    name = "hermes"
    starts = ("<tool_call>",)
    special = ("</tool_call>",)

    def detect(self, template: str) -> bool:
        return "<tool_call>" in template and '{"name": ' in template.replace("\\", "").replace("{{", "{")

    def read(self, context: CallContext, start: str) -> Steps[None]:
        yield from context.scan.skip_space()
        yield from pass_call(context, end="</tool_call>")
        yield from context.scan.skip_closing("</tool_call>")

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        bodies = (f"{lark.quoted(tool.name)} {ARGUMENTS} {grammar.arguments(tool)}" for tool in tools)
        begin, end = grammar.text('<tool_call>\n{"name": '), grammar.text("}\n</tool_call>")
        call = grammar.rule("call", f"{begin} {lark.any_of(bodies)} {end}")
        return f'{call} ("\\n" {call})*' if several else call
