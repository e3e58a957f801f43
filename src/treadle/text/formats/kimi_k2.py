"""Kimi K2 format: a section of calls with ids such as `functions.get_weather:0`, and JSON arguments.

Source: chat template and tool-calling guide of moonshotai/Kimi-K2-Instruct, and the template of Kimi-K2-Thinking
(llama.cpp, models/templates/moonshotai-Kimi-K2-Thinking.jinja). The counter of the ids goes on over a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolSpec
from .json_calls import pass_arguments
from .scanner import Markers, Steps
from .sections import SectionFormat

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_END_OF_ID = Markers(ARGUMENTS, CALL_END, SECTION_END)
_ID = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::[0-9]+)?", re.DOTALL)


class KimiK2(SectionFormat):
    """Calls between markers of their own, in a section or without one."""

    name = "kimi_k2"
    section, section_end, call = SECTION, SECTION_END, CALL
    starts = (SECTION, CALL)
    special = (SECTION_END, ARGUMENTS, CALL_END)

    def detect(self, template: str) -> bool:
        return SECTION in template or "<|im_system|>tool_declare<|im_middle|>" in template

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        begin, behind_id, end = grammar.text(f"{CALL}functions."), grammar.text(ARGUMENTS), grammar.text(CALL_END)
        bodies = (
            f"{lark.literal(f'{tool.name}:')} /[0-9]{{1,4}}/ {behind_id} {grammar.arguments(tool)}" for tool in tools
        )
        call = grammar.rule("call", f"{begin} {lark.any_of(bodies)} {end}")
        return f"{grammar.text(SECTION)} {call}{'+' if several else ''} {grammar.text(SECTION_END)}"

    def read_call(self, context: CallContext) -> Steps[None]:
        call_id, marker = yield from context.scan.take_until(_END_OF_ID)
        match = _ID.fullmatch(call_id.strip())
        if marker != ARGUMENTS or match is None:
            context.scan.fail(f"expected {ARGUMENTS!r} behind the id of a call")
        context.out.call_start(match["name"], call_id.strip())
        yield from pass_arguments(context, CALL_END)
