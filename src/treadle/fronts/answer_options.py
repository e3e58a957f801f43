"""Options of an answer that text workers act on: tools, a grammar, and a budget of reasoning."""

from __future__ import annotations

from typing import Any

import msgspec

from ..text.formats.base import ToolChoice, ToolSpec


class OutputGrammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that the answer follows: `kind` and `spec` of `grammar.build`. `param` is the field that refusals
    name. `close_at_limit`: where the limit of tokens comes near, only tokens are allowed that complete the grammar."""

    kind: str
    spec: Any
    param: str
    close_at_limit: bool = False


class AnswerOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of one request. `tools` may be called as `choice` says, with `parallel` several in one answer;
    `tools_param` is the field that refusals name; `tool_schemas` are the places of the tools' schemas, where those are
    not OpenAI's. `output` is the grammar of an answer without calls. Reasoning is
    ended after `thinking_budget` tokens (None: no limit). `close_at_limit` is that of calls. `prediction` is text that
    the client expects in the answer, None where it says nothing."""

    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    tools_param: str = "tools"
    tool_schemas: tuple[str, ...] = ()
    output: OutputGrammar | None = None
    thinking_budget: int | None = None
    close_at_limit: bool = False
    prediction: str | None = None


NO_OPTIONS = AnswerOptions()


def tool_definitions(options: AnswerOptions) -> list[dict[str, Any]] | None:
    """Return the tools as templates take them; None for none, or where none may be called."""
    if not options.tools or options.choice.mode == "none":
        return None
    return [{"type": "function", "function": _function(tool)} for tool in options.tools]


def _function(tool: ToolSpec) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": tool.parameters or {"type": "object", "properties": {}}}
