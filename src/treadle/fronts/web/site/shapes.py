"""JSON schemas in words: the type of a field, its limits, and the named shapes within it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

REF = "#/components/schemas/"
Schema = Mapping[str, Any]
JOINS = ("anyOf", "oneOf", "allOf")
PLURALS = {"string": "strings", "integer": "integers", "number": "numbers", "boolean": "booleans", "object": "objects"}


def alternatives(schema: Schema) -> list[Schema]:
    """Return the schemas of which a value fits one, without null: null is the same as leaving a field out."""
    joined = [inner for join in JOINS for inner in schema.get(join, ())]
    if joined:
        shared = {key: value for key, value in schema.items() if key in ("type", "enum")}
        return [found for inner in joined for found in alternatives({**shared, **inner})]
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [{**schema, "type": kind} for kind in kinds if kind != "null"]
    return [] if kinds == "null" or schema.get("const", ...) is None else [schema]


def type_of(schema: Schema) -> str:
    """Describe the type: `string or array of strings`."""
    return " or ".join(dict.fromkeys(_type(one) for one in alternatives(schema))) or "null"


def _type(one: Schema) -> str:
    if "$ref" in one:
        return _name(one["$ref"])
    if "const" in one:
        return _value(one["const"])
    if "enum" in one:
        return " or ".join(_value(value) for value in one["enum"] if value is not None) or "null"
    match one.get("type", "array" if "items" in one else "object" if "properties" in one else "any"):
        case "array":
            return f"array of {_plural(type_of(one['items']))}" if one.get("items") else "array"
        case "object" if isinstance(one.get("additionalProperties"), dict) and one["additionalProperties"]:
            return f"object of {_plural(type_of(one['additionalProperties']))}"
        case kind:
            return str(kind)


def _plural(words: str) -> str:
    if words.startswith("array of "):
        return f"arrays of {words.removeprefix('array of ')}"
    return PLURALS.get(words, f"({words})" if " or " in words else words)


def limits_of(schema: Schema) -> list[str]:
    """Describe each limit on a value; those of items and of the values of keys begin with `each`."""
    found: list[str] = []
    for one in alternatives(schema):
        found += _limits(one)
        for inner in ("items", "additionalProperties"):
            if isinstance(one.get(inner), dict):
                found += [f"each {limit}" for limit in limits_of(one[inner])]
    return list(dict.fromkeys(found))


def _limits(one: Schema) -> Iterator[str]:
    yield from _range(one)
    for kind, unit in (("Length", "characters"), ("Items", "items"), ("Properties", "keys")):
        low, high = one.get(f"min{kind}", 0), one.get(f"max{kind}")
        if high is not None:
            yield f"{low:,} to {high:,} {unit}" if low else f"up to {high:,} {unit}"
        elif low:
            yield f"at least {low:,} {unit if low > 1 else unit.removesuffix('s')}"
    if "pattern" in one:
        yield f"like {one['pattern']}"


def _range(one: Schema) -> Iterator[str]:
    low, above = one.get("minimum"), one.get("exclusiveMinimum")
    high, below = one.get("maximum"), one.get("exclusiveMaximum")
    if low is not None and high is not None:
        yield f"{_number(low)} to {_number(high)}"
        return
    bounds = (("at least", low), ("above", above), ("at most", high), ("below", below))
    words = [f"{word} {_number(bound)}" for word, bound in bounds if bound is not None]
    if words:
        yield ", ".join(words)


def _number(value: float) -> str:
    """Format a number; powers of two from 2³¹ on as such, which are unreadable otherwise."""
    whole = int(value)
    for off, words in ((0, ""), (1, " − 1")):
        power = (abs(whole) + off).bit_length() - 1
        if whole == value and power >= 31 and abs(whole) + off == 1 << power:
            return f"{'−' if whole < 0 else ''}2^{power}{words}"
    text = f"{value:,}" if whole == value else f"{value:g}"
    return text.removesuffix(".0").replace("-", "−")


def default_of(schema: Schema) -> str:
    """Return the default as JSON; empty if there is none, or if it is null."""
    default = schema.get("default")
    return "" if default is None else _value(default)


def is_empty(schema: Schema) -> bool:
    """Whether only null and empty values fit, so that the field has no effect."""
    values = [value for one in alternatives(schema) for value in one.get("enum", [one.get("const", ...)])]
    return all(value is None or value in ("", [], {}) for value in values)


def refs_in(schema: Schema) -> Iterator[str]:
    """Yield the names of the shapes that a value may hold, directly, as an item, or as a value of a key."""
    for one in alternatives(schema):
        if "$ref" in one:
            yield _name(one["$ref"])
        for key in ("items", "additionalProperties"):
            if isinstance(one.get(key), dict):
                yield from refs_in(one[key])


def _name(ref: str) -> str:
    return ref.removeprefix(REF)


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
