"""Assertions of JSON Schema in a form that llguidance enforces: older drafts, counts, strings, enums."""

from __future__ import annotations

import re
from typing import Any

from .formats import NATIVE, PATTERNS, REFUSED
from .instances import Instances
from .numbers import EXACT
from .patterns import check_pattern
from .places import Node, below, refusal

_NOT_ONLY = re.compile(r"\^\(\?!\^\[([-+.\w]+)\]\*\$\)")


def modern(source: dict[str, Any]) -> dict[str, Any]:
    """Return the schema as Draft 2020-12 writes it."""
    out = dict(source)
    if isinstance(source.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in source:
            out["items"] = out.pop("additionalItems")
    out.pop("additionalItems", None)
    for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(source.get(exclusive), bool):
            del out[exclusive]
            if source[exclusive] and limit in source:
                out[exclusive] = out.pop(limit)
    return out


def without_unevaluated(source: dict[str, Any], of: str, at: Node) -> dict[str, Any]:
    """Rewrite unevaluatedProperties and unevaluatedItems to the keywords that mean the same in a schema that stands
    alone."""
    key, plain = f"unevaluated{of}", "additionalProperties" if of == "Properties" else "items"
    if source.get(key, True) is True:
        return source
    if at.merged:
        raise refusal(below(at.place, key), f"is not supported beside other schemas: use {plain} in each of them")
    rest = {name: value for name, value in source.items() if name != key}
    return {plain: source[key]} | rest


def counts(source: dict[str, Any], out: dict[str, Any], place: str) -> dict[str, Any]:
    """Return minProperties and maxProperties, unless the properties imply them. Raises InvalidRequest where names would
    have to differ: grammars do not compare them."""
    counts: dict[str, Any] = {key: int(source[key]) for key in ("minProperties", "maxProperties") if key in source}
    if counts.get("minProperties", 0) <= len(out.get("required", ())):
        counts.pop("minProperties", None)
    if counts.get("minProperties", 0) > len(out.get("required", ())) + 1:
        raise refusal(below(place, "minProperties"), "is not supported beyond one more than the required properties")
    closed = out.get("additionalProperties") is False and "patternProperties" not in out
    if closed and counts.get("maxProperties", 0) >= len(out.get("properties", ())):
        counts.pop("maxProperties", None)
    return counts


def string(source: dict[str, Any], place: str) -> dict[str, Any]:
    out: dict[str, Any] = {key: int(source[key]) for key in ("minLength", "maxLength") if key in source}
    name = source.get("format", "")
    if name in REFUSED:
        raise refusal(below(place, "format"), f"is not supported in a grammar: use pattern instead of '{name}'")
    if name in NATIVE:
        out["format"] = name
    patterns = [PATTERNS[name]] if name in PATTERNS else []
    if "pattern" in source:
        check_pattern(source["pattern"], below(place, "pattern"))
        patterns += _without_lookahead(source["pattern"])
    if patterns:
        out["pattern"] = patterns[0]
    if patterns[1:]:
        out["allOf"] = [{"type": "string", "pattern": pattern} for pattern in patterns[1:]]
    return out


def _without_lookahead(pattern: str) -> list[str]:
    """Return patterns that together mean the same as one that begins with a look-ahead against texts of a few
    characters alone, as Pydantic's for decimal numbers does; any other one as it is."""
    found = _NOT_ONLY.match(pattern)
    return [f"^{pattern[found.end() :]}", f"[^{found[1]}]"] if found else [pattern]


def values(source: dict[str, Any], at: Node, instances: Instances) -> dict[str, Any]:
    """Return an enum of the values that the other keywords allow, with the keywords of strings that llguidance
    compares with them."""
    listed = source.get("enum", [source["const"]] if "const" in source else [])
    found = instances.satisfying(listed, {key: part for key, part in source.items() if key != "enum"}, at)
    key = below(at.place, "enum" if "enum" in source else "const")
    if not found:
        raise refusal(key, "has no value that the other keywords allow")
    for value in found:
        if isinstance(value, int) and abs(value) > EXACT:
            raise refusal(key, f"has an integer beyond {EXACT}, which is not exact in JSON: use a string")
    texts = string(source, at.place) if any(isinstance(value, str) for value in found) else {}
    return {"enum": found, **texts}
