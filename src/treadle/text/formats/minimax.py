"""Formats of MiniMax M2 and DeepSeek V3.2: `<invoke name="...">` elements with a `<parameter name="...">` each.

Source: chat templates of MiniMaxAI/MiniMax-M2 (llama.cpp, models/templates/unsloth-MiniMax-M2.jinja) and
deepseek-ai/DeepSeek-V3.2 (models/templates/DeepSeek-V3.2.jinja), whose elements have the special token `｜DSML｜` in
their names, and whose parameters say whether they are strings. Strings are written as they are, other values as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .scanner import Markers, Steps
from .typed_grammar import ValueGrammar
from .typed_values import STRING, ArgumentsBuilder

DSML = "｜DSML｜"

_END_OF_TAG = Markers(">")
_NAME = re.compile(
    r"""(?:name=)?(?P<quote>["'])?(?P<name>(?(quote).*?|[^"'\s]*))["']?(?:\s+string="(?P<string>true|false)")?""",
    re.DOTALL,
)


class MiniMax(ToolFormat):
    """`<invoke name="NAME">` elements in `<minimax:tool_call>`."""

    name = "minimax"
    starts: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    special: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>",)
    one_block = True
    typed = True
    prefix: ClassVar[str] = ""
    declares: ClassVar[bool] = False

    def detect(self, template: str) -> bool:
        return self.starts[0] in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan, end = context.scan, f"</{start[1:]}"
        while True:
            yield from scan.skip_space()
            if (yield from scan.expect(f"<{self.prefix}invoke", end)) == end:
                return
            yield from self._read_call(context)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        begin, end, end_of_value = self.starts[0], f"</{self.starts[0][1:]}", f"</{self.prefix}parameter>"
        values = ValueGrammar(grammar, f"{end_of_value}\n", (end_of_value,), declares=self.declares)
        call = grammar.rule("call", lark.any_of(self._call(tool, grammar, values) for tool in tools))
        calls = call + "+" * several
        return " ".join((grammar.text(f"{begin}\n"), calls, grammar.text(end)))

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return self.starts[:1]

    def _call(self, tool: ToolSpec, grammar: lark.Grammar, values: ValueGrammar) -> str:
        head, end = f'<{self.prefix}invoke name="{tool.name}">\n', f"</{self.prefix}invoke>\n"
        each = values.parameters(
            tool, lambda key, value, is_string: f"({grammar.text(self._before(key, is_string=is_string))} {value})"
        )
        return f"({grammar.text(head)} {each} {grammar.text(end)})"

    def can_name(self, key: str) -> bool:
        found = _NAME.fullmatch(self._before(key, is_string=True).partition(" ")[2][:-1])
        return ">" not in key and found is not None and found["name"] == key == key.strip() != ""

    def _before(self, key: str, *, is_string: bool) -> str:
        return f'<{self.prefix}parameter name="{key}">'

    def _read_call(self, context: CallContext) -> Steps[None]:
        name, _ = yield from self._read_tag(context)
        context.out.call_start(name)
        arguments = ArgumentsBuilder(context, name)
        end = f"</{self.prefix}invoke>"
        while True:
            yield from context.scan.skip_space()
            if (yield from context.scan.expect(f"<{self.prefix}parameter", end)) == end:
                break
            key, types = yield from self._read_tag(context)
            yield from arguments.pass_text(key, Markers(f"</{self.prefix}parameter>"), types)
        arguments.end()
        context.out.call_end()

    def _read_tag(self, context: CallContext) -> Steps[tuple[str, tuple[str, ...] | None]]:
        """Read the rest of an opening tag. Return the name, and the types that it declares for the value."""
        text, _ = yield from context.scan.take_until(_END_OF_TAG)
        match = _NAME.fullmatch(text.strip())
        if match is None or not match["name"].strip():
            context.scan.fail("expected a name in an element")
        types = {"true": (STRING,), "false": ("",)}.get(match["string"] or "")
        return match["name"].strip(), types


class DeepSeekV32(MiniMax):
    """`<｜DSML｜invoke name="NAME">` elements in `<｜DSML｜function_calls>`."""

    name = "deepseek_v32"
    starts = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>")
    special = (DSML,)
    prefix = DSML
    declares = True

    def detect(self, template: str) -> bool:
        return DSML in template

    def _before(self, key: str, *, is_string: bool) -> str:
        return f'<{DSML}parameter name="{key}" string="{str(is_string).lower()}">'
