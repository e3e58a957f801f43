"""Formats of DeepSeek V3, R1 and V3.1: calls between special tokens with full-width bars, with JSON arguments.

Source: chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1 (vLLM,
examples/tool_chat_template_deepseekv3.jinja and tool_chat_template_deepseekv31.jinja; llama.cpp, models/templates).
V3 writes `function<sep>NAME`, a line feed and the arguments in a block of Markdown; V3.1 `NAME<sep>` and the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolSpec
from .json_calls import pass_arguments
from .scanner import Markers, Steps
from .sections import SectionFormat

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_END_OF_HEAD = Markers(SEPARATOR, CALL_END, SECTION_END)
FENCE = "```"
_LANGUAGE = re.compile(r"[a-z]*")
_NAME = re.compile(r"[^\s{`<]*")


class DeepSeekV31(SectionFormat):
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, any number in a section. Reads V3's, too."""

    name = "deepseek_v31"
    section, section_end, call = SECTION, SECTION_END, CALL
    starts = (SECTION, CALL)
    special = (SECTION_END, SEPARATOR, CALL_END)

    def detect(self, template: str) -> bool:
        return CALL in template

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        call = grammar.rule("call", lark.any_of(self._call(tool, grammar) for tool in tools))
        more = f"({self._between} {call})*" if several else ""
        return f"{grammar.text(SECTION)} {call} {more} {grammar.text(SECTION_END)}"

    _between = ""

    def _call(self, tool: ToolSpec, grammar: lark.Grammar) -> str:
        head = grammar.text(f"{CALL}{tool.name}{SEPARATOR}")
        return f"{head} {grammar.arguments(tool)} {grammar.text(CALL_END)}"

    def read_call(self, context: CallContext) -> Steps[None]:
        scan = context.scan
        head, marker = yield from scan.take_until(_END_OF_HEAD)
        if marker != SEPARATOR:
            scan.fail(f"expected {SEPARATOR!r} in a call")
        yield from scan.skip_space()
        if (yield from scan.peek()) in ("{", "<", "`"):
            context.out.call_start(head)
        else:
            context.out.call_start((yield from scan.take_run(_NAME)))
            yield from scan.skip_space()
        if (yield from scan.accept(FENCE)):
            yield from scan.take_run(_LANGUAGE)
            yield from pass_arguments(context, FENCE)
            yield from scan.skip_closing(CALL_END)
            scan.forget()
        else:
            yield from pass_arguments(context, CALL_END)


class DeepSeekV3(DeepSeekV31):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and the arguments in a block of Markdown. Reads V3.1's, too."""

    name = "deepseek_v3"
    _between = lark.literal("\n")

    def detect(self, template: str) -> bool:
        return CALL in template and "```json" in template

    def _call(self, tool: ToolSpec, grammar: lark.Grammar) -> str:
        head = grammar.text(f"{CALL}function{SEPARATOR}{tool.name}\n```json\n")
        end = grammar.text(f"\n{FENCE}{CALL_END}")
        return f"{head} {grammar.arguments(tool)} {end}"
