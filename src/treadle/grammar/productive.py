"""Finite values of recursive schemas: a schema that only infinite values match is refused, and a part is left out."""

from __future__ import annotations

from typing import Any

from .places import refusal

_NAMED = ("properties", "patternProperties")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
"""Keywords with schemas: by names, in a list, and one alone."""


def keep_finite(schema: dict[str, Any], param: str) -> None:
    """Replace the parts of a rewritten schema that only infinitely deep values match by `false`: objects that require
    one of their own kind, and references that lead back to themselves. A grammar would lead into them, and find no text
    there. Raises InvalidRequest if they are the whole schema."""
    definitions = schema.get("$defs", {})
    users: dict[str, list[str]] = {}
    for name, definition in definitions.items():
        for used in _references(definition):
            users.setdefault(used, []).append(name)
    finite: set[str] = set()
    open_names = list(definitions)
    while open_names:
        name = open_names.pop()
        if name not in finite and _is_finite(definitions[name], finite):
            finite.add(name)
            open_names += users.get(name, ())
    if not _is_finite(schema, finite):
        raise refusal(
            param, "allows no finite value: a required part allows none, or refers back to itself. Make it optional"
        )
    for name in definitions.keys() - finite:
        del definitions[name]
    stack = [schema, *definitions.values()]
    while stack:
        for place, key, part in _parts(stack.pop()):
            if not _is_finite(part, finite):
                place[key] = False
            elif isinstance(part, dict):
                stack.append(part)


def _parts(schema: Any) -> list[tuple[Any, Any, Any]]:
    """Return the schemas right below one, each behind the object or list that holds it, and its key there."""
    if isinstance(schema, bool):
        return []
    found = [(schema[key], name, part) for key in _NAMED for name, part in schema.get(key, {}).items()]
    found += [(schema[key], index, part) for key in _LISTED for index, part in enumerate(schema.get(key, ()))]
    return found + [(schema, key, schema[key]) for key in _SINGLE if key in schema]


def _references(schema: Any) -> set[str]:
    """Return the names of the definitions that a schema refers to."""
    found, stack = set[str](), [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str):
                found.add(_name(ref))
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return found


def _name(ref: str) -> str:
    return ref.rpartition("/")[2]


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether a schema has a value, if the definitions named in `finite` have one."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and _name(schema["$ref"]) not in finite:
        return False
    if not all(_is_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_is_finite(part, finite) for part in schema[key]):
            return False
    return _has_other_type(schema) or (_object_is_finite(schema, finite) and _array_is_finite(schema, finite))


def _has_other_type(schema: dict[str, Any]) -> bool:
    types = schema.get("type", "null" if "enum" not in schema else "string")
    return bool({*([types] if isinstance(types, str) else types)} - {"object", "array"})


def _object_is_finite(schema: dict[str, Any], finite: set[str]) -> bool:
    """Whether all required properties have a value. Of a name that is not listed it is not found out which patterns it
    matches: one of them with a value is enough."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    others = [schema.get("additionalProperties", True), *schema.get("patternProperties", {}).values()]
    if any(name not in properties for name in required) and not any(_is_finite(part, finite) for part in others):
        return False
    return all(_is_finite(properties[name], finite) for name in required if name in properties)


def _array_is_finite(schema: dict[str, Any], finite: set[str]) -> bool:
    prefix, items = schema.get("prefixItems", []), schema.get("items", True)
    parts = [*prefix, items] if schema.get("minItems", 0) > len(prefix) else prefix[: schema.get("minItems", 0)]
    return all(_is_finite(part, finite) for part in parts)
