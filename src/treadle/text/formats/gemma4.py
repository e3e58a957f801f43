"""Formats of Gemma 4 and FunctionGemma: calls with arguments in a notation of their own.

Source: chat templates of google/gemma-4 (llama.cpp, models/templates/gemma4.jinja) and google/functiongemma-270m-it.
Strings stand between `<|"|>` or `<escape>`, which are special tokens, and have no escapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from . import lark
from .bare_grammar import BareGrammar
from .bare_notation import BareNotation
from .base import CallContext, ToolFormat, ToolSpec
from .scanner import Steps

_NAME = re.compile(r"[\w.\-]*")


class Gemma4(ToolFormat):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>`, repeated."""

    name = "gemma4"
    text_grammars = False
    starts = ("<|tool_call>",)
    special = ("<tool_call|>", '<|"|>')
    end: ClassVar[str] = "<tool_call|>"
    delimiter: ClassVar[str] = '<|"|>'

    def detect(self, template: str) -> bool:
        return self.starts[0] in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan, out = context.scan, context.out
        yield from scan.skip_space()
        yield from scan.expect("call:")
        name = yield from scan.take_run(_NAME)
        if (yield from scan.peek()) != "{":
            scan.fail("expected the arguments of a call in braces")
        out.call_start(name)
        yield from BareNotation(self.delimiter).pass_object(scan, out.arguments)
        out.call_end()
        yield from scan.skip_closing(self.end)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        bodies = (
            f"{lark.literal(tool.name)} {BareGrammar(grammar, self.delimiter, tool).arguments()}" for tool in tools
        )
        begin, end = grammar.text(f"{self.starts[0]}call:"), grammar.text(self.end)
        call = grammar.rule("call", f"{begin} {lark.any_of(bodies)} {end}")
        return call + "+" * several

    def can_name(self, key: str) -> bool:
        return self.delimiter not in key


class FunctionGemma(Gemma4):
    """`<start_function_call>call:NAME{key:<escape>text<escape>,other:3}<end_function_call>`, repeated."""

    name = "functiongemma"
    starts = ("<start_function_call>",)
    special = ("<end_function_call>", "<escape>")
    end = "<end_function_call>"
    delimiter = "<escape>"
