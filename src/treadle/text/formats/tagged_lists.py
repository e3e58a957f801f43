"""Formats that write all calls as one JSON array between two markers: Nemotron and Hunyuan.

Source: chat templates of nvidia/NVIDIA-Nemotron-Nano-9B-v2 and nvidia/Llama-3_3-Nemotron-Super-49B-v1_5 (llama.cpp,
models/templates) and tencent/Hunyuan-A13B-Instruct (vLLM, examples/tool_chat_template_hunyuan_a13b.jinja).
"""

from __future__ import annotations

from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .json_calls import call_objects, pass_calls
from .scanner import Steps


class TaggedList(ToolFormat):
    """`BEGIN[{"name": NAME, "arguments": {...}}, ...]END`, where `starts` is BEGIN and `special` END."""

    one_block = True

    def detect(self, template: str) -> bool:
        return f"{self.starts[0]}[" in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        yield from context.scan.skip_space()
        yield from pass_calls(context)
        yield from context.scan.skip_closing(self.special[0])

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        calls = call_objects(tools, grammar, several=several)
        return f"{grammar.text(self.starts[0])} {calls} {grammar.text(self.special[0])}"

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return self.starts


class Nemotron(TaggedList):
    """`<TOOLCALL>[{"name": NAME, "arguments": {...}}, ...]</TOOLCALL>`."""

    name = "nemotron"
    starts = ("<TOOLCALL>",)
    special = ("</TOOLCALL>",)


class Hunyuan(TaggedList):
    """`<tool_calls>[{"name": NAME, "arguments": {...}}, ...]</tool_calls>`."""

    name = "hunyuan_a13b"
    starts = ("<tool_calls>",)
    special = ("</tool_calls>",)
