"""JSON schemas of the structured workloads: seeded schemas, values of them, and the check of an answer.

Every value that a schema allows is short, so that an answer ends by itself on a server that follows the schema.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .lorem import WORDS

MAX_CHARS, MAX_ITEMS, MAX_NUMBER = 12, 3, 999

Schema = dict[str, Any]


def random_schema(rng: random.Random, properties: int) -> Schema:
    """Make a closed object schema of so many properties, all of them required. Their types come in a fixed order; the
    seed chooses names and values: schemas of one size are alike in work."""
    names = rng.sample(WORDS, min(properties, len(WORDS)))
    return _object({name: PROPERTIES[i % len(PROPERTIES)](rng) for i, name in enumerate(names)})


def _object(properties: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _string(rng: random.Random) -> Schema:
    return {"type": "string", "maxLength": rng.randint(MAX_CHARS // 2, MAX_CHARS)}


def _choice(rng: random.Random) -> Schema:
    return {"enum": rng.sample(WORDS, 4)}


def _integer(rng: random.Random) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": rng.randint(MAX_NUMBER // 2, MAX_NUMBER)}


def _boolean(_: random.Random) -> Schema:
    return {"type": "boolean"}


def _array(rng: random.Random) -> Schema:
    return {"type": "array", "items": _integer(rng), "minItems": 1, "maxItems": MAX_ITEMS}


def _nested(rng: random.Random) -> Schema:
    return _object({name: make(rng) for name, make in zip(rng.sample(WORDS, 2), (_choice, _integer), strict=True)})


PROPERTIES: tuple[Callable[[random.Random], Schema], ...] = (_string, _integer, _choice, _array, _boolean, _nested)


def random_value(rng: random.Random, schema: Schema) -> Any:
    """Make a value that `schema`, one of this module's, allows."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    return VALUES[schema["type"]](rng, schema)


VALUES: dict[str, Callable[[random.Random, Schema], Any]] = {
    "object": lambda rng, schema: {name: random_value(rng, sub) for name, sub in schema["properties"].items()},
    "array": lambda rng, schema: [
        random_value(rng, schema["items"]) for _ in range(rng.randint(schema["minItems"], schema["maxItems"]))
    ],
    "string": lambda rng, schema: rng.choice(WORDS)[: schema["maxLength"]],
    "integer": lambda rng, schema: rng.randint(schema["minimum"], schema["maximum"]),
    "boolean": lambda rng, _: rng.random() < 0.5,
}


def matches(value: Any, schema: Schema) -> bool:
    """Whether `schema`, one of this module's, allows the value."""
    if "enum" in schema:
        return value in schema["enum"]
    return CHECKS[schema["type"]](value, schema)


def _is_object(value: Any, schema: Schema) -> bool:
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and value.keys() == properties.keys()
        and all(matches(value[name], sub) for name, sub in properties.items())
    )


def _is_array(value: Any, schema: Schema) -> bool:
    return (
        isinstance(value, list)
        and schema["minItems"] <= len(value) <= schema["maxItems"]
        and all(matches(item, schema["items"]) for item in value)
    )


def _is_integer(value: Any, schema: Schema) -> bool:
    """JSON schema counts 1.0 as an integer, and true as none."""
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)
    return whole and bool(schema["minimum"] <= value <= schema["maximum"])


CHECKS: dict[str, Callable[[Any, Schema], bool]] = {
    "object": _is_object,
    "array": _is_array,
    "string": lambda value, schema: isinstance(value, str) and len(value) <= schema["maxLength"],
    "integer": _is_integer,
    "boolean": lambda value, _: isinstance(value, bool),
}
