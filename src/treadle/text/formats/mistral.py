"""Formats of Mistral's models, all behind `[TOOL_CALLS]`.

Source: mistral-common, tokenizers up to v7 (one JSON array of calls), v11 (name, id and JSON arguments) and v13 (name
and JSON arguments); vLLM, examples/tool_chat_template_mistral3.jinja; templates of mistralai/Mistral-7B-Instruct-v0.3,
Mistral-Small-3.2-24B-Instruct-2506 and Magistral-Small-2509. Ids have nine letters or digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import lark
from .base import CallContext, ToolFormat, ToolSpec
from .json_calls import call_objects, pass_arguments, pass_calls
from .scanner import Steps

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_WORD = re.compile(r"[^\s\[{]*")
_ID = "/[a-zA-Z0-9]{9}/"


class Mistral(ToolFormat):
    """`[TOOL_CALLS]NAME[ARGS]{...}`, perhaps with `[CALL_ID]ID`, repeated. Reads the older array, too."""

    name = "mistral"
    starts = (CALLS,)
    special = (CALL_ID, ARGUMENTS)

    def detect(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS in template

    def read(self, context: CallContext, start: str) -> Steps[None]:
        scan = context.scan
        yield from scan.skip_space()
        if (yield from scan.peek()) in ("[", "{"):
            yield from pass_calls(context)
            return
        name = yield from scan.take_run(_WORD)
        yield from scan.skip_space()
        call_id = None
        if (yield from scan.accept(CALL_ID)):
            call_id = yield from scan.take_run(_WORD)
            yield from scan.skip_space()
        yield from scan.accept(ARGUMENTS)
        yield from scan.skip_space()
        if (yield from scan.peek()) != "{":
            scan.fail("expected the arguments of a call")
        context.out.call_start(name, call_id)
        yield from pass_arguments(context)

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        call_id = f"({grammar.text(CALL_ID)} {_ID})?"
        bodies = (
            f"{lark.literal(tool.name)} {call_id} {grammar.text(ARGUMENTS)} {grammar.arguments(tool)}" for tool in tools
        )
        call = grammar.rule("call", f"{grammar.text(CALLS)} {lark.any_of(bodies)}")
        return call + "+" * several


class MistralArray(Mistral):
    """`[TOOL_CALLS] [{"name": NAME, "arguments": {...}, "id": ID}, ...]`. Reads the newer format, too."""

    name = "mistral_array"
    one_block = True

    def detect(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS not in template

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        call_id = rf'(", \"id\": \"" {_ID} "\"")?'
        calls = call_objects(tools, grammar, several=several, more_keys=call_id)
        return f'{grammar.text(CALLS)} " "? {calls}'
