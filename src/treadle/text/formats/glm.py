"""GLM format: a name, and keys and values of the arguments as elements, of GLM-4.5 and later.

Source: chat templates of zai-org/GLM-4.5, GLM-4.6 (llama.cpp, models/templates/glm_4_5.jinja and GLM-4.6.jinja) and
GLM-4.7, which writes no line feeds between the elements. Strings are written as they are, other values as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .scanner import Markers, Steps
from .typed_grammar import ValueGrammar
from .typed_values import ArgumentsBuilder

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_END_OF_NAME = Markers("\n", KEY, CALL_END)
_END_OF_KEY = Markers(KEY_END, CALL_END)
_END_OF_VALUE = Markers(VALUE_END)


class Glm(ToolFormat):
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` on lines of their own."""

    name = "glm"
    starts = (CALL,)
    special = (CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    typed = True
    line_end: ClassVar[str] = "\n"

    def detect(self, template: str) -> bool:
        return KEY in template and not _on_one_line(template)

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        yield from scan.skip_space()
        name, marker = yield from scan.take_until(_END_OF_NAME)
        context.out.call_start(name)
        arguments = ArgumentsBuilder(context, name.strip())
        if marker == "\n":
            marker = yield from _next_marker(context)
        while marker == KEY:
            yield from _read_argument(context, arguments)
            marker = yield from _next_marker(context)
        arguments.end()
        context.out.call_end()

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        values = ValueGrammar(grammar, VALUE_END + self.line_end, (VALUE_END,))
        call = grammar.rule("call", lark.any_of(self._call(tool, grammar, values) for tool in tools))
        more = f'("\\n"? {call})*' if several else ""
        return f"{call} {more}"

    def _call(self, tool: ToolSpec, grammar: lark.Grammar, values: ValueGrammar) -> str:
        head, end = grammar.text(f"{CALL}{tool.name}{self.line_end}"), grammar.text(CALL_END)
        each = values.parameters(tool, lambda key, value, _: f"({grammar.text(self._before(key))} {value})")
        return f"({head} {each} {end})"

    def can_name(self, key: str) -> bool:
        return _END_OF_KEY.find(key, 0) is None and key == key.strip() != ""

    def _before(self, key: str) -> str:
        return f"{KEY}{key}{KEY_END}{self.line_end}{VALUE}"


class Glm47(Glm):
    """The elements of GLM without line feeds between them. Reads GLM-4.5's, too."""

    name = "glm47"
    line_end = ""

    def detect(self, template: str) -> bool:
        return KEY in template and _on_one_line(template)


def _on_one_line(template: str) -> bool:
    return f"}}{KEY}{{" in template


def _next_marker(context: CallContext) -> Steps[str]:
    yield from context.scan.skip_space()
    return (yield from context.scan.expect(KEY, CALL_END))


def _read_argument(context: CallContext, arguments: ArgumentsBuilder) -> Steps[None]:
    key, marker = yield from context.scan.take_until(_END_OF_KEY)
    if marker != KEY_END:
        context.scan.fail(f"expected {KEY_END!r}")
    yield from context.scan.skip_space()
    yield from context.scan.expect(VALUE)
    yield from arguments.pass_text(key.strip(), _END_OF_VALUE)
