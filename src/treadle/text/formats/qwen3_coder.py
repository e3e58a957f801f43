"""Formats of Qwen3-Coder, Qwen3.5 and Seed-OSS: `<function=name><parameter=key>value</parameter></function>`, values as
text.

Source: chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, and of ByteDance-Seed/Seed-OSS-36B-Instruct (llama.cpp,
models/templates/ByteDance-Seed-OSS.jinja), which has an outer marker of its own and values on the marker's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .scanner import Markers, Steps
from .typed_grammar import ValueGrammar
from .typed_values import ArgumentsBuilder

FUNCTION, PARAMETER = "<function=", "<parameter="
END_PARAMETER, END_FUNCTION = "</parameter>", "</function>"
NEWLINE = "\n"
END_NAME = Markers(">")
# Models leave out `</parameter>`: then the next parameter, or the end of the function, on a line of its own ends it.
NEXT_VALUE = (f"\n{PARAMETER}", f"\n{END_FUNCTION}")


class Qwen3Coder(ToolFormat):
    """Calls as XML-like elements, perhaps between `<tool_call>` and `</tool_call>`. `margin` stands on both sides of a
    value."""

    name = "qwen3_coder"
    starts = ("<tool_call>", FUNCTION)
    special = ("</tool_call>",)
    typed = True
    margin: ClassVar[str] = NEWLINE

    def detect(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template and "<seed:tool_call>" not in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        if start != FUNCTION:
            yield from scan.skip_space()
            yield from scan.expect(FUNCTION)
        name, _ = yield from scan.take_until(END_NAME)
        context.out.call_start(name)
        yield from self._read_parameters(context, ArgumentsBuilder(context, name.strip()))
        context.out.call_end()
        yield from scan.skip_closing(self.special[0])

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        values = ValueGrammar(grammar, f"{self.margin}{END_PARAMETER}\n", (END_PARAMETER, *NEXT_VALUE))
        functions = lark.any_of(
            f"{lark.literal(f'{tool.name}>{NEWLINE}')} {values.parameters(tool, self._parameter)}" for tool in tools
        )
        begin, end = grammar.text(f"{self.starts[0]}\n{FUNCTION}"), grammar.text(f"{END_FUNCTION}\n{self.special[0]}")
        call = grammar.rule("call", f"{begin} {functions} {end}")
        return f'{call} ("\\n" {call})*' if several else call

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return self.starts[:1]

    def can_name(self, key: str) -> bool:
        return END_NAME.find(key, 0) is None and key == key.strip() != ""

    def _parameter(self, key: str, value: str, is_string: bool) -> str:
        return f"({lark.literal(f'{PARAMETER}{key}>{self.margin}')} {value})"

    def _read_parameters(self, context: CallContext, arguments: ArgumentsBuilder) -> Steps[None]:
        scan, marker = context.scan, ""
        ends = Markers(f"{self.margin}{END_PARAMETER}", END_PARAMETER, *NEXT_VALUE)
        while True:
            if not marker.endswith((PARAMETER, END_FUNCTION)):
                yield from scan.skip_space()
                marker = yield from scan.expect(PARAMETER, END_FUNCTION, *self.special)
            if not marker.endswith(PARAMETER):
                arguments.end()
                return
            key, _ = yield from scan.take_until(END_NAME)
            if self.margin:
                yield from scan.accept(self.margin)
            marker = yield from arguments.pass_text(key.strip(), ends)


class SeedOss(Qwen3Coder):
    """Calls between `<seed:tool_call>` and `</seed:tool_call>`, each value directly between its markers."""

    name = "seed_oss"
    starts = ("<seed:tool_call>", FUNCTION)
    special = ("</seed:tool_call>",)
    margin = ""

    def detect(self, template: str) -> bool:
        return self.starts[0] in template
