"""Proofs that no value matches two branches of a oneOf."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from .keywords import types_of
from .places import Node

Branch = dict[str, Any]


def are_disjoint(branches: list[Branch]) -> bool:
    """Whether no value matches two branches, by the types that they name or the values that they list."""
    return all(
        _types_differ(one, other) or _values_differ(one, other) for one, other in itertools.combinations(branches, 2)
    )


def branch_tag(branches: list[Branch], resolve: Callable[[Any, Node], Branch], at: Node) -> str | None:
    """Return a property whose listed values tell all branches that are objects apart, if they require it; None if there
    is none. Branches of other types are told apart by their type."""
    objects = [branch for branch in branches if isinstance(branch.get("properties"), dict)]
    rest = [branch for branch in branches if not isinstance(branch.get("properties"), dict)]
    if len(objects) < 2 or not all(_types_differ(one, other) for one in rest for other in branches if one is not other):
        return None
    if any(types_of(branch) != ("object",) or (at.merged and "type" not in branch) for branch in objects):
        return None
    for name in objects[0]["properties"]:
        values = [{"enum": _values(resolve(branch["properties"].get(name, {}), at))} for branch in objects]
        required = all(name in branch.get("required", ()) for branch in objects)
        if (required or not at.exact) and all(_values_differ(*pair) for pair in itertools.combinations(values, 2)):
            return str(name)
    return None


def _types_differ(one: Branch, other: Branch) -> bool:
    first, second = _types(one), _types(other)
    return bool(first) and bool(second) and not first & second


def _types(branch: Branch) -> set[str]:
    if "type" not in branch:
        return set()
    types = {*types_of({"type": branch["type"]})}
    return types | {"integer"} if "number" in types else types


def _values_differ(one: Branch, other: Branch) -> bool:
    first, second = _values(one), _values(other)
    return bool(first) and bool(second) and not {*map(_key, first)} & {*map(_key, second)}


def _values(branch: Branch) -> list[Any]:
    if "const" in branch:
        return [branch["const"]]
    values = branch.get("enum")
    return values if isinstance(values, list) else []


def _key(value: Any) -> str:
    """Return a text that equal JSON values share."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
