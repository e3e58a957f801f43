"""Format of Qwen3-Coder and Qwen3.5: `<function=name><parameter=key>value</parameter></function>`, values as text."""

from __future__ import annotations

from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .scanner import Markers, Steps
from .typed_grammar import ValueGrammar
from .typed_values import ArgumentsBuilder

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_CALL = "</function>", "</tool_call>"
NEWLINE = "\n"
END_NAME = Markers(">")
# Models leave out `</parameter>`: then the next parameter, or the end of the function, on a line of its own ends it.
END_VALUE = Markers("\n</parameter>", "</parameter>", f"\n{PARAMETER}", f"\n{END_FUNCTION}")


class Qwen3Coder(ToolFormat):
    """Calls as XML-like elements, perhaps between `<tool_call>` and `</tool_call>`."""

    name = "qwen3_coder"
    starts = ("<tool_call>", FUNCTION)
    special = (END_CALL,)
    typed = True

    def detect(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        if start != FUNCTION:
            yield from scan.skip_space()
            yield from scan.expect(FUNCTION)
        name, _ = yield from scan.take_until(END_NAME)
        context.out.call_start(name)
        yield from _read_parameters(context, ArgumentsBuilder(context, name.strip()))
        context.out.call_end()
        yield from scan.skip_closing(END_CALL)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        values = ValueGrammar(grammar, "\n</parameter>\n", ("</parameter>", f"\n{PARAMETER}", f"\n{END_FUNCTION}"))
        functions = lark.any_of(
            f"{lark.literal(f'{tool.name}>{NEWLINE}')} {values.parameters(tool, _parameter)}" for tool in tools
        )
        begin, end = grammar.text("<tool_call>\n<function="), grammar.text("</function>\n</tool_call>")
        call = grammar.rule("call", f"{begin} {functions} {end}")
        return f'{call} ("\\n" {call})*' if several else call

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return ("<tool_call>",)


def _parameter(key: str, value: str) -> str:
    return f"({lark.literal(f'{PARAMETER}{key}>{NEWLINE}')} {value})"


def _read_parameters(context: CallContext, arguments: ArgumentsBuilder) -> Steps[None]:
    scan, marker = context.scan, ""
    while True:
        if not marker.endswith((PARAMETER, END_FUNCTION)):
            yield from scan.skip_space()
            marker = yield from scan.expect(PARAMETER, END_FUNCTION, END_CALL)
        if not marker.endswith(PARAMETER):
            arguments.end()
            return
        key, _ = yield from scan.take_until(END_NAME)
        yield from scan.accept("\n")
        marker = yield from arguments.pass_text(key.strip(), END_VALUE)
