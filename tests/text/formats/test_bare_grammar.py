"""Grammar of Gemma's notation of objects: what it allows is read as JSON that is valid by the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from treadle.text.formats.base import REQUIRED, ToolChoice, ToolSpec
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.registry import find
from treadle.text.formats.schema_branches import Unheld

from .vectors.vector import calls_of, read
from .walks import Walker

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}},
    "required": ["value"],
    "additionalProperties": False,
}
ONLY_A: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "a"}},
    "required": ["type"],
    "additionalProperties": False,
}
MISSING_B = {**ONLY_A, "properties": {"type": {"const": "b"}}, "required": ["type", "extra"]}
FALSE_B = {**MISSING_B, "properties": {"type": {"const": "b"}, "extra": False}, "additionalProperties": True}

SCHEMAS: dict[str, dict[str, Any]] = {
    "optional members alone": {"properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"const": 1}}},
    "optional before required": {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["b"]},
    "constants": {
        "properties": {"a": {"const": {"x": ["y", 1.5, None, True]}}, "b": {"enum": ["u", 2, False, None, []]}},
        "required": ["a", "b"],
    },
    "alternatives": {
        "properties": {
            "a": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
            "b": {"oneOf": [{"const": "x"}, {"type": "null"}]},
            "c": {"allOf": [{"enum": ["only"]}], "description": "one"},
        },
        "required": ["a", "b", "c"],
    },
    "bounds": {
        "properties": {
            "a": {"type": "integer", "minimum": 3, "maximum": 12},
            "b": {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": 3},
                "minItems": 2,
                "maxItems": 3,
            },
            "c": {"type": "array", "maxItems": 0},
            "d": {"type": "array", "items": {"type": "null"}, "minItems": 1},
        },
        "required": ["a", "b", "c", "d"],
    },
    "a schema in itself": {
        "properties": {"tree": {"$ref": "#/$defs/tree"}},
        "required": ["tree"],
        "$defs": {"tree": TREE},
    },
    "types": {"properties": {"a": {"type": ["integer", "null"]}, "b": {"type": "number"}}, "required": ["a", "b"]},
    "keys with colons, quotes and spaces": {
        "properties": {"a:b": {"type": "null"}, 'c "d"': {"type": "null"}},
        "required": ["a:b", 'c "d"'],
    },
    "any members of a type": {"additionalProperties": {"type": "integer"}},
    "an object without members": {"properties": {}, "additionalProperties": False},
    "alternatives that no object matches": {
        "properties": {"kind": {"anyOf": [ONLY_A, MISSING_B, FALSE_B, {**MISSING_B, "type": ["object", "null"]}]}},
        "required": ["kind"],
    },
    "alternatives of the root that no object matches": {"oneOf": [ONLY_A, MISSING_B]},
    "nested objects": {
        "properties": {"a": {"properties": {"b": {"type": "object", "additionalProperties": {"type": "null"}}}}},
        "required": ["a"],
    },
}


def arguments(name: str, schema: dict[str, Any], walker: Walker, seed: int) -> Any:
    """Return the arguments of a random call that the grammar of a schema allows."""
    tool = ToolSpec("f", parameters={"type": "object", **schema})
    found = find(name).constraint([tool], ToolChoice(REQUIRED), parallel=False, special=walker.vocabulary.ids)
    assert found is not None
    segments = walker.segments(walker.walk(found.grammar, random.Random(seed)))
    calls = calls_of(read(ReaderSetup(name, tools=("f",)), [segments]))
    assert [call for call, _ in calls.values()] == ["f"]
    return json.loads(calls[0][1])


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(('<|"|>', "<|tool_call>", "<tool_call|>"))


@pytest.mark.parametrize("case", SCHEMAS)
@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
def test_arguments_are_valid_by_their_schema(name: str, case: str, walker: Walker) -> None:
    import jsonschema  # takes a second: by its worker alone, not in each that collects the tests

    for seed in range(8):
        jsonschema.validate(arguments(name, SCHEMAS[case], walker, seed), SCHEMAS[case])


def test_any_value_may_stand_where_the_schema_says_nothing(walker: Walker) -> None:
    schema: dict[str, Any] = {"properties": {"a": {}, "b": True}, "required": ["a", "b"]}
    found = [arguments("gemma4", schema, walker, seed) for seed in range(12)]
    assert all(value.keys() == {"a", "b"} for value in found)
    assert len({type(value["a"]) for value in found}) > 2


def test_a_tool_without_a_schema_takes_any_object(walker: Walker) -> None:
    assert all(isinstance(arguments("gemma4", {}, walker, seed), dict) for seed in range(6))


@pytest.mark.parametrize("name", ["gemma4", "functiongemma", "qwen3_coder", "llama_pythonic"])
def test_a_schema_that_no_object_matches_is_refused(name: str, walker: Walker) -> None:
    tool = ToolSpec("f", parameters={"type": "object", "anyOf": [MISSING_B, FALSE_B]}, strict=True)
    with pytest.raises(Unheld, match="allows no value"):
        find(name).constraint([tool], ToolChoice(REQUIRED), parallel=False, special=walker.vocabulary.ids)


@pytest.mark.parametrize("target", ["#/$defs/none", "https://example.invalid/schema"])
def test_a_reference_that_leads_nowhere_is_refused(target: str, walker: Walker) -> None:
    tool = ToolSpec("f", parameters={"properties": {"a": {"$ref": target}}}, strict=True)
    with pytest.raises(Unheld, match="which is not in it") as raised:
        find("gemma4").constraint([tool], ToolChoice(REQUIRED))
    assert (raised.value.param, raised.value.parameter) == ("tools", "a")
    assert isinstance(arguments("gemma4", tool.parameters, walker, 0), dict)
