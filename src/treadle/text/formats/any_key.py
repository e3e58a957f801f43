"""Parameters of tools that declare none: any names and values, in formats that write them one by one."""

from __future__ import annotations

from . import lark
from .base import ToolSpec

ANY_KEY = "\ufdd0"
"""Stands for the name of any parameter, in an expression that `with_any_key` completes: a Unicode noncharacter."""


def takes_any(tool: ToolSpec) -> bool:
    """Whether a tool takes any parameters: its schema lists none, and does not forbid them."""
    return "properties" not in tool.parameters and tool.parameters.get("additionalProperties") is not False


def with_any_key(expression: str, grammar: lark.Grammar) -> str:
    """Return an expression with a terminal of names in place of `ANY_KEY`, which stands in string literals."""
    key = grammar.terminal("KEY", r"/[A-Za-z_][A-Za-z0-9_]*/")
    return expression.replace(ANY_KEY, f'" {key} "')
