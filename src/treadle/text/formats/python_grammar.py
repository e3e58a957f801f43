"""Grammar of calls written as Python, `name(key=value, ...)`, with JSON text as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import lark
from .any_key import ANY_KEY, takes_any, with_any_key
from .base import ToolFormat, ToolSpec
from .typed_values import properties_of

_DEFINITIONS = ("$defs", "definitions")


def python_calls(tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool, separator: str = ", ") -> str:
    """Return the expression of one call of one of `tools`; with `several` of one or more, with `separator` between."""
    call = grammar.rule("call", lark.any_of(_call(tool, grammar) for tool in tools))
    return f"{call} ({lark.literal(separator)} {call})*" if several else call


class PythonList(ToolFormat):
    """Base of the formats that write all calls as one bare list, `[NAME(key="text", other=3)]`."""

    text_grammars = False
    one_block = True

    def calls(self, tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool) -> str:
        return f'"[" {python_calls(tools, grammar, several=several)} "]"'

    def triggers(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return tuple(f"[{tool.name}(" for tool in tools)


def _call(tool: ToolSpec, grammar: lark.Grammar) -> str:
    if takes_any(tool):
        one = with_any_key(f"{lark.literal(ANY_KEY + '=')} {grammar.json({})}", grammar)
        return f'{lark.literal(tool.name + "(")} ({one} (", " {one})*)? ")"'
    required = [key for key in tool.parameters.get("required", ()) if isinstance(key, str)]
    keys = dict.fromkeys([*properties_of(tool), *required])
    parts = [(_argument(key, tool, grammar), key in required) for key in keys]
    return f'{lark.literal(tool.name + "(")} {grammar.separated(parts, ", ")} ")"'


def _argument(key: str, tool: ToolSpec, grammar: lark.Grammar) -> str:
    schema: Any = properties_of(tool).get(key, {})
    definitions = {name: tool.parameters[name] for name in _DEFINITIONS if name in tool.parameters}
    value = {**definitions, **schema} if isinstance(schema, Mapping) else schema
    return f"{lark.literal(key + '=')} {grammar.json(value)}"
