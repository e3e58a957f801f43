"""Parameters of tools that declare none: any names and values, in formats that write them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import lark
from .schema_branches import lengths

ANY_KEY = "\ufdd0"
"""Stands for the name of any parameter, in an expression that `with_any_key` completes: a Unicode noncharacter."""


def takes_any(schema: Mapping[str, Any]) -> bool:
    """Whether a plain schema of an object takes any parameters: it lists none, and does not forbid them."""
    return "properties" not in schema and schema.get("additionalProperties") is not False


def repeated(member: str, separator: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of as many members as a plain schema of an object allows, with a separator between them."""
    least, most = lengths(schema, "Properties")
    if most == 0:
        return '""'
    between = f"{lark.literal(separator)} " if separator else ""
    if (least, most) == (0, None):
        return f"({member} ({between}{member})*)?" if separator else f"({member})*"
    more = "" if most == 1 else f"({between}{member}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    return f"{member} {more}" if least else f"({member} {more})?"


def with_any_key(expression: str, grammar: lark.Grammar) -> str:
    """Return an expression with a terminal of names in place of `ANY_KEY`, which stands in string literals."""
    key = grammar.terminal("KEY", r"/[A-Za-z_][A-Za-z0-9_]*/")
    return expression.replace(ANY_KEY, f'" {key} "')
