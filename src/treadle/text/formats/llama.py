"""Formats of Llama 3 and 4: bare JSON, `{"name": ..., "parameters": {...}}`, or Python, `[name(key=value)]`.

Both are read alike: a model that is asked for one of them may write the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import json_call, lark, python_call
from .base import CallContext, ToolFormat, ToolSpec
from .python_grammar import PythonList
from .scanner import Steps

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


class Llama(ToolFormat):
    """Parser of both formats."""

    starts = (PYTHON_TAG, PYTHON_START)
    bare_starts = ("{", "[")
    special = (PYTHON_END,)

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        if start in self.starts:
            yield from scan.skip_space()
            start = (yield from scan.accept("{", "[")) or ""
        if start == "{":
            yield from _read_json_calls(context)
        elif start == "[":
            yield from python_call.pass_list(context)
        else:
            yield from python_call.pass_call(context, suffix=".call")
        yield from scan.skip_closing(PYTHON_END)


class LlamaJson(Llama):
    """JSON calls, with "; " between several."""

    name = "llama3_json"

    def detect(self, template: str) -> bool:
        return '"parameters": dictionary of argument name' in template.replace("\\", "")

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        begin, middle = lark.literal('{"name": '), lark.literal(', "parameters": ')
        call = grammar.rule(
            "call",
            lark.any_of(f'{begin} {lark.quoted(tool.name)} {middle} {grammar.arguments(tool)} "}}"' for tool in tools),
        )
        return f'{call} ("; " {call})*' if several else call

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return tuple(f'{{"name": "{tool.name}"' for tool in tools)


class LlamaPythonic(PythonList, Llama):
    """Python calls in one list."""

    name = "llama_pythonic"

    def detect(self, template: str) -> bool:
        return PYTHON_START in template or "[func_name1(params_name1=params_value1" in template


def _read_json_calls(context: CallContext) -> Steps[None]:
    yield from json_call.pass_call(context, opened=True)
    while True:
        yield from context.scan.skip_space()
        if (yield from context.scan.accept(";")) is None:
            return
        yield from context.scan.skip_space()
        yield from json_call.pass_call(context)
