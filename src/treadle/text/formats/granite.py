"""Granite 3 format: `<|tool_call|>` and a JSON array of calls.

Source: chat templates of ibm-granite/granite-3.0-8b-instruct to granite-3.3-8b-instruct, and Granite 3.1's habit of
writing `<tool_call>` in plain text (vLLM, docs on Granite's tool parsers). Granite 4 writes the Hermes format.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .json_calls import call_objects, pass_calls
from .scanner import Steps

CALLS, PLAIN_CALLS, CALLS_END = "<|tool_call|>", "<tool_call>", "</tool_call>"


class Granite(ToolFormat):
    """`<|tool_call|>[{"name": NAME, "arguments": {...}}, ...]`."""

    name = "granite"
    starts = (CALLS, PLAIN_CALLS)
    one_block = True

    def detect(self, template: str) -> bool:
        return "<|start_of_role|>" in template and "<tool_call>" not in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        yield from context.scan.skip_space()
        yield from pass_calls(context)
        if start == PLAIN_CALLS:
            yield from context.scan.skip_closing(CALLS_END)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        return f"{grammar.text(CALLS)} {call_objects(tools, grammar, several=several)}"

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return (CALLS,)
