"""Random schemas of numbers and of listed values: whatever is not refused writes values that are valid, exactly."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from typing import Any

import pytest

from tests.support.grammar_walks import random_text
from treadle.errors import InvalidRequest
from treadle.grammar.build import build

LIMITS = [0, 1, -1, 2, 10, 100, -100, 1000, 0.1, 0.5, -0.5, 1.5, -1.5, 0.15, -2.25, 0.001, 9.99, 1e-9, -1e-7, 1e-11]
MULTIPLES = [1, 2, 3, 5, 7, 10, 60, 100, 1000, 0.5, 0.25, 0.1, 0.01, 1.5, 0.3, 4.5, 1e-5]
VALUES: list[Any] = [0, 1, 2, 3, 10, 2.5, -1.5, None, True, False, "", "a", "abc", "2024-02-29", "2024-02-30", [], [1]]
VALUES += [[1, "a"], [[], 2.5], {}, {"a": 1}, {"a": "x", "b": 2}, {"b": [1, 2]}, {"a": {"a": 10}}]


def is_valid(value: Any, schema: Any, definitions: dict[str, Any]) -> bool:
    """A validator of the keywords used here, in exact numbers."""
    if isinstance(schema, bool):
        return schema
    parts = {key: [is_valid(value, part, definitions) for part in schema.get(key, ())] for key in ("allOf", "anyOf")}
    if not all(parts["allOf"]) or ("anyOf" in schema and not any(parts["anyOf"])):
        return False
    if "$ref" in schema and not is_valid(value, definitions[schema["$ref"].rpartition("/")[2]], definitions):
        return False
    if "type" in schema and not is_of(value, schema["type"]):
        return False
    if "enum" in schema and not any(same(value, other) for other in schema["enum"]):
        return False
    match value:
        case Fraction():
            return is_within(value, {key: exact(part) for key, part in schema.items() if is_of(exact(part), "number")})
        case str():
            return schema.get("minLength", 0) <= len(value) and (
                schema.get("format") != "date" or value == "2024-02-29"
            )
        case list():
            items = all(is_valid(item, schema.get("items", True), definitions) for item in value)
            return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 9) and items
        case dict():
            rest, known = schema.get("additionalProperties", True), schema.get("properties", {})
            properties = all(is_valid(part, known.get(name, rest), definitions) for name, part in value.items())
            return {*schema.get("required", ())} <= value.keys() and properties
    return True


def exact(value: Any) -> Any:
    return Fraction(str(value)) if isinstance(value, int | float) and not isinstance(value, bool) else value


def is_of(value: Any, kind: str) -> bool:
    kinds = {"number": Fraction, "string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
    if kind == "integer":
        return isinstance(value, Fraction) and value.denominator == 1
    return isinstance(value, kinds[kind])


def same(value: Any, other: Any) -> bool:
    return json.dumps(value, sort_keys=True, default=float) == json.dumps(
        json.loads(json.dumps(other), parse_int=Fraction, parse_float=Fraction), sort_keys=True, default=float
    )


def is_within(value: Fraction, given: dict[str, Fraction]) -> bool:
    if not given.get("minimum", value) <= value <= given.get("maximum", value):
        return False
    if value <= given.get("exclusiveMinimum", value - 1) or value >= given.get("exclusiveMaximum", value + 1):
        return False
    return value % given.get("multipleOf", value or Fraction(1)) == 0


def numbers(draws: random.Random, level: int = 0) -> dict[str, Any]:
    """Draw a schema of numbers that is an intersection of several."""
    schema: dict[str, Any] = {}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if draws.random() < 0.25:
            schema[key] = draws.choice(LIMITS)
    if draws.random() < 0.4:
        schema["multipleOf"] = draws.choice(MULTIPLES)
    if draws.random() < 0.5 or level == 0:
        schema["type"] = draws.choice(["number", "number", "integer"])
    if draws.random() < 0.15:
        schema["enum"] = draws.sample([0, 1, 1.5, 2, -1, 100, 700, 0.25, 10], 4)
    if level < 2 and draws.random() < 0.7:
        match draws.choice(["allOf", "anyOf", "$ref"]):
            case "$ref":
                schema["$ref"] = "#/$defs/X"
            case key:
                schema[key] = [numbers(draws, level + 1) for _ in range(2)]
    return schema


def listed(draws: random.Random) -> dict[str, Any]:
    """Draw a list of values beside keywords that allow some of them."""
    siblings: dict[str, Any] = {
        "type": draws.choice(["integer", "number", "string", "array", "object"]),
        "minimum": draws.choice(LIMITS),
        "exclusiveMaximum": draws.choice(LIMITS),
        "multipleOf": draws.choice(MULTIPLES),
        "minLength": draws.choice([0, 1, 2]),
        "format": "date",
        "minItems": 1,
        "maxItems": draws.choice([0, 1]),
        "items": draws.choice([False, {"type": "integer"}, {"$ref": "#/$defs/X"}]),
        "required": draws.choice([["a"], ["b"]]),
        "properties": {"a": draws.choice([True, False, {"type": "integer"}, {"anyOf": [{"type": "string"}, False]}])},
        "additionalProperties": draws.choice([False, {"multipleOf": 2}]),
    }
    return {"enum": draws.sample(VALUES, 6)} | {key: siblings[key] for key in draws.sample([*siblings], 3)}


def in_place(draws: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """Put a schema of a value where numbers meet in another way: in properties of objects that are intersected."""
    match draws.choice(["alone", "alone", "properties", "patterns"]):
        case "properties":
            objects = [{"type": "object", "required": ["a"], "properties": {"a": part}} for part in (schema, {})]
            objects[1]["properties"] = {"a": numbers(draws, 2)}
            return {"allOf": objects}
        case "patterns":
            return {
                "type": "object",
                "required": ["ab"],
                "properties": {"ab": schema},
                "patternProperties": {"^a": numbers(draws, 2)},
            }
    return schema


def value_of(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is valid, with patterns as properties."""
    definitions = schema["$defs"]
    value = json.loads(text, parse_int=Fraction, parse_float=Fraction)
    patterns = schema.get("patternProperties", {}).values()
    return is_valid(value, schema, definitions) and all(is_valid(value["ab"], part, definitions) for part in patterns)


@pytest.mark.parametrize("block", range(5))
def test_what_is_not_refused_is_written_validly(block: int) -> None:
    written = 0
    for seed in range(block * 60, block * 60 + 60):
        draws = random.Random(seed)
        schema = in_place(draws, numbers(draws)) if seed % 2 else listed(draws)
        schema["$defs"] = {"X": numbers(draws, 2)}
        try:
            grammar = build("json_schema", schema, param="schema").grammar
        except InvalidRequest:
            continue
        for walk in range(2):
            text = random_text(grammar, walk)
            assert value_of(text, schema), (seed, text, schema)
        written += 1
    assert written > 15
