"""Formats of Phi-4-mini: JSON calls between two special tokens, or a list of them behind the word `functools`.

Source: chat template and special tokens of microsoft/Phi-4-mini-instruct, its template for llama.cpp
(models/templates/llama-cpp-microsoft-Phi-4-mini-instruct.jinja), and the prompt with which vLLM asks for calls
(examples/tool_chat_template_phi4_mini.jinja). Each format reads both forms, and forces its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .json_calls import ARGUMENTS, NAME, call_objects, pass_calls
from .scanner import Steps

CALL, CALL_END, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools["


class Phi4Mini(ToolFormat):
    """`<|tool_call|>{"name": NAME, "arguments": {...}}<|/tool_call|>`, or an array of such objects."""

    name = "phi4_mini"
    starts = (CALL, FUNCTOOLS)
    special = (CALL_END,)

    def detect(self, template: str) -> bool:
        return "<|tool|>" in template and "<|/tool|>" in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        yield from scan.skip_space()
        yield from pass_calls(context, opened=start == FUNCTOOLS)
        yield from scan.skip_closing(CALL_END)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        array = call_objects(tools, grammar, several=several)
        bodies = (f"{lark.quoted(tool.name)} {ARGUMENTS} {grammar.arguments(tool)}" for tool in tools)
        single = f'{NAME} {lark.any_of(bodies)} "}}"'
        call = f"{grammar.text(CALL)} ({single} | {array}) {grammar.text(CALL_END)}"
        return grammar.rule("call", call) + "+" * several

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return (CALL,)

    def past_calls(self, calls: Sequence[str], mark: Callable[[str], str]) -> str:
        return f"{mark(CALL)}[{', '.join(calls)}]{mark(CALL_END)}"


class Phi4MiniFunctools(Phi4Mini):
    """`functools[{"name": NAME, "arguments": {...}}, ...]`."""

    name = "phi4_mini_functools"
    one_block = True

    def detect(self, template: str) -> bool:
        return FUNCTOOLS in template

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        return f"{lark.literal(FUNCTOOLS[:-1])} {call_objects(tools, grammar, several=several)}"

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return (FUNCTOOLS,)

    def past_calls(self, calls: Sequence[str], mark: Callable[[str], str]) -> str:
        return f"{FUNCTOOLS}{', '.join(calls)}]"
