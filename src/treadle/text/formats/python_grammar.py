"""Grammar of calls written as Python, `name(key=value, ...)`, with JSON text as values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import lark
from .any_key import ANY_KEY, repeated, takes_any, with_any_key
from .base import ToolFormat, ToolSpec
from .schema_branches import SchemaRoot
from .typed_grammar import members_of, objects_of

_BARE_KEY = re.compile(r"[^\s=,(){}\[\]'\"*]([^\s=,(){}'\"]|[^\S\n](?=\S))*")


def python_calls(tools: Sequence[ToolSpec], grammar: lark.Grammar, *, several: bool, separator: str = ", ") -> str:
    """Return the expression of one call of one of `tools`; with `several` of one or more, with `separator` between.
    Raises Unheld for a strict tool with a schema that can't be held."""
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
    root = SchemaRoot(tool.parameters, exact=tool.strict, tool=tool.name)
    arguments = (_arguments(branch, root, grammar) for branch in objects_of(tool, root, grammar))
    return f'{lark.literal(tool.name + "(")} {lark.any_of(arguments)} ")"'


def _arguments(branch: Mapping[str, Any], root: SchemaRoot, grammar: lark.Grammar) -> str:
    if takes_any(branch):
        value = grammar.json(root.alone(branch.get("additionalProperties", {})))
        one = with_any_key(f"{lark.literal(ANY_KEY + '=')} {value}", grammar)
        return repeated(one, ", ", branch)
    required = branch.get("required", ())
    members = members_of(branch).items()
    parts = [(_argument(key, root.alone(schema), grammar), key in required) for key, schema in members]
    return grammar.separated(parts, ", ")


def _argument(key: str, schema: Mapping[str, Any], grammar: lark.Grammar) -> str:
    """Return the expression of an argument. A name that could be something else is written in quotes."""
    written = f"{key}=" if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False) + "="
    return f"{lark.literal(written)} {grammar.json(schema)}"
