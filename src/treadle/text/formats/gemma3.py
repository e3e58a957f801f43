"""Formats of Gemma 3, which has no tokens for calls: a template or the system prompt asks for one of several forms.

Source: Google's guide to function calling with Gemma (a list of calls in Python, or a JSON object with `name` and
`parameters`), its prompts for blocks of `tool_code`, and vLLM's examples/tool_chat_template_gemma3_pythonic.jinja.
Each format reads all of these forms, and forces its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import json_call, lark
from .base import CallContext, ToolFormat, ToolSpec
from .python_call import pass_call, pass_list
from .python_grammar import PythonList, python_calls
from .scanner import Steps

FENCE, TOOL_CODE, TOOL_CALL = "```", "```tool_code", "```tool_call"


class Gemma3(ToolFormat):
    """`{"name": NAME, "parameters": {...}}`, perhaps in a block of Markdown."""

    name = "gemma3"
    starts = (TOOL_CODE, TOOL_CALL)
    bare_starts = ("```json", "```python", "{", "[")

    def detect(self, template: str) -> bool:
        return "<start_of_turn>" in template and "<start_function_call>" not in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        yield from scan.skip_space()
        if start in ("[", "{"):
            yield from self._read_bare(context, start)
            return
        first = yield from scan.peek()
        if first == "{":
            yield from json_call.pass_call(context)
        elif first == "[":
            scan.advance(1)
            yield from pass_list(context)
        else:
            yield from self._read_statements(context)
        yield from scan.skip_closing(FENCE)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        bodies = (f"{lark.literal(_head(tool))} {grammar.arguments(tool)}" for tool in tools)
        call = grammar.rule("call", f'{lark.any_of(bodies)} "}}"')
        return f'{call} ("\\n" {call})*' if several else call

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return tuple(map(_head, tools))

    def _read_bare(self, context: CallContext, start: str) -> Steps[None]:
        if start == "[":
            yield from pass_list(context)
        else:
            yield from json_call.pass_call(context, opened=True)

    def _read_statements(self, context: CallContext) -> Steps[None]:
        """Read calls on lines of their own, each perhaps in a call of print."""
        scan = context.scan
        while True:
            printed = yield from scan.accept("print(")
            yield from pass_call(context)
            if printed:
                yield from scan.skip_closing(")")
            yield from scan.skip_space()
            if (yield from scan.peek()) in ("`", ""):
                return


class Gemma3Pythonic(PythonList, Gemma3):
    """`[NAME(key="text", other=3)]`."""

    name = "gemma3_pythonic"

    def detect(self, template: str) -> bool:
        return "<start_of_turn>" in template and "python list" in template.lower()


class Gemma3ToolCode(Gemma3):
    """Calls on lines of their own in a block of Markdown that begins with ```` ```tool_code ````."""

    name = "gemma3_tool_code"
    text_grammars = False
    one_block = True

    def detect(self, template: str) -> bool:
        return "<start_of_turn>" in template and "tool_code" in template

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        calls = python_calls(tools, grammar, several=several, separator="\n")
        return f'{lark.literal(TOOL_CODE)} "\\n" {calls} "\\n```"'

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return (TOOL_CODE,)


def _head(tool: ToolSpec) -> str:
    return f'{{"name": "{tool.name}", "parameters": '
