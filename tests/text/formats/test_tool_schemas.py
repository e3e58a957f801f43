"""Tools with schemas of all kinds in every format: what the grammar of a strict tool allows is read as arguments that
are valid by the schema, or the tool is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from treadle.grammar.build import json_rule
from treadle.text.events import Malformed, Text
from treadle.text.formats.base import REQUIRED, ToolChoice, ToolSpec
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.registry import FORMATS
from treadle.text.formats.schema_branches import Unheld
from treadle.text.formats.typed_values import parameter_types

from .cuts import cut
from .vectors.vector import calls_of, read
from .walks import Walker

WALKS = 5
TYPED = [name for name, tool_format in FORMATS.items() if tool_format.typed]
ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
DEFINITIONS = {"color": {"enum": ["red", "green"]}, "point": {"type": "object", "properties": {"x": {"type": "null"}}}}
NAMES = ("ids[]", "first name", "a-b.c", 'q"uote', "it's", "a=b", "f(x)", "x, y", "日本", "$ref", "type")
VALUES: dict[str, Any] = {
    "a nullable enum": {"anyOf": [{"type": "string", "enum": ["red", "green"]}, {"type": "null"}]},
    "a nullable enum by reference": {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
    "one schema in allOf": {"allOf": [{"$ref": "#/$defs/color"}], "description": "one"},
    "several schemas in allOf": {"allOf": [{"type": "string", "maxLength": 4}, {"minLength": 2}]},
    "a reference with a limit beside it": {"$ref": "#/$defs/color", "maxLength": 3},
    "a nullable text with a length": {"type": ["string", "null"], "maxLength": 3},
    "a nullable text of a least length": {"type": ["string", "null"], "minLength": 4, "maxLength": 6},
    "lengths as floats": {"type": "string", "minLength": 2.0, "maxLength": 4.0},
    "values of several types": {"enum": [1, "1", None, "null", True]},
    "an enum and a type": {"type": "string", "enum": ["red", None, 1]},
    "an enum and numbers": {"anyOf": [{"enum": ["all", "5"]}, {"type": "integer", "minimum": 1, "maximum": 20}]},
    "text or a number with limits": {"type": ["string", "number"], "maxLength": 5, "minimum": 0, "maximum": 9},
    "text or a number": {"type": ["string", "integer"], "maxLength": 4},
    "text or one number": {"anyOf": [{"const": 5}, {"type": "string", "maxLength": 2}]},
    "text or true": {"anyOf": [{"const": True}, {"type": "string", "maxLength": 6}]},
    "text or a list of texts": {
        "anyOf": [{"type": "string", "maxLength": 6}, {"type": "array", "items": {"type": "string"}, "maxItems": 1}]
    },
    "text or an object": {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]},
    "values with quotes and spaces": {"enum": ['"q"', " a ", "b\n", ""]},
    "the same or null": {"enum": ['"q"', " a ", "b\n", "", None, "3"]},
    "a list of one": {"type": "array", "items": {"$ref": "#/$defs/color"}, "maxItems": 1},
    "a list of one or more": {
        "type": "array",
        "items": {"type": ["string", "null"], "maxLength": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "a list of references to a property": {"type": "array", "items": {"$ref": "#/properties/billing"}, "maxItems": 2},
    "a reference to a property": {"$ref": "#/properties/billing"},
    "the tool itself": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    "members of a type": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1},
    "objects or nothing": {"type": "object", "properties": {}, "maxProperties": 0},
    "objects that a constant tells apart": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": key}, key: {"type": "null"}}, "required": ["k", key]}
            for key in ("a", "b")
        ]
    },
    "limits of Draft 4": {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 3},
}
BESIDE: dict[str, dict[str, Any]] = {
    "a reference at the root": {"$ref": "#/$defs/address", "$defs": {"address": ADDRESS}},
    "one schema in allOf at the root": {"allOf": [{"$ref": "#/$defs/address"}], "$defs": {"address": ADDRESS}},
    "alternatives at the root": {
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "no parameters": {"properties": {}},
    "a parameter that is never given": {"properties": {"a": False, "b": {"type": "null"}}},
    "any names with values of a type": {"additionalProperties": {"type": "string", "maxLength": 6}},
    "an anchor": {
        "properties": {"a": {"type": "array", "items": {"$ref": "#c"}, "maxItems": 2}},
        "required": ["a"],
        "$defs": {"c": {"$anchor": "c", "enum": ["red"]}},
    },
}
SCHEMAS = {
    name: {
        "type": "object",
        "properties": {"billing": ADDRESS, "value": value},
        "required": ["value"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    for name, value in VALUES.items()
} | {name: {"type": "object", **schema} for name, schema in BESIDE.items()}


def rule(schema: Mapping[str, Any]) -> str:
    return json_rule(dict(schema), param="tools", check=False).removeprefix("%json ")


@pytest.fixture(scope="module")
def walkers() -> dict[str, Walker]:
    return {}


@pytest.fixture
def walker(name: str, walkers: dict[str, Walker]) -> Walker:
    tool_format = FORMATS[name]
    special = tuple(dict.fromkeys((*tool_format.starts, *tool_format.special)))
    return walkers.setdefault(name, Walker(special if sum(map(ord, name)) % 2 else ()))


def grammar(name: str, tool: ToolSpec, walker: Walker) -> str:
    special = walker.vocabulary.ids
    found = FORMATS[name].constraint((tool,), ToolChoice(REQUIRED), parallel=False, special=special, schema=rule)
    assert found is not None
    return found.grammar


def arguments(name: str, tool: ToolSpec, walker: Walker, text: str, draw: random.Random) -> Any:
    """Return the arguments of a random call that a grammar allows."""
    while True:
        try:
            segments = walker.segments(walker.walk(text, draw))
        except UnicodeDecodeError:  # a token is half a character here
            continue
        break
    setup = ReaderSetup(name, tools=(tool.name,), types=parameter_types((tool,)))
    events = read(setup, cut(segments, draw))
    assert not [event for event in events if isinstance(event, Malformed | Text)], (segments, events)
    [(called, found)] = calls_of(events).values()
    assert called == tool.name
    return json.loads(found)


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_valid_by_their_schema(name: str, walker: Walker) -> None:
    from jsonschema import Draft4Validator, Draft202012Validator  # takes a second: by its worker alone

    for case, schema in SCHEMAS.items():
        valid = (Draft4Validator if "Draft 4" in case else Draft202012Validator)(schema)
        tool = ToolSpec("f", "", schema, strict=True)
        text = grammar(name, tool, walker)
        for seed in range(WALKS):
            found = arguments(name, tool, walker, text, random.Random(f"{name} {case} {seed}"))
            assert not list(valid.iter_errors(found)), (case, found)


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_may_have_any_name_that_a_format_can_write(name: str, walker: Walker) -> None:
    for key in NAMES:
        tool = ToolSpec("f", "", {"type": "object", "properties": {key: {"enum": [1]}}, "required": [key]})
        assert FORMATS[name].can_name(key)
        found = arguments(name, tool, walker, grammar(name, tool, walker), random.Random(key))
        assert found == {key: 1}


@pytest.mark.parametrize("name", TYPED)
def test_a_value_that_would_end_the_call_is_left_out_or_refused(name: str, walker: Walker) -> None:
    end = {"glm": "</arg_value>", "glm47": "</arg_value>", "deepseek_v32": "</｜DSML｜parameter>"}.get(
        name, "</parameter>"
    )
    for values in ([end, "<"], [end, "<", None]):
        properties = {"a": {"enum": values}}
        schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
        tool = ToolSpec("f", "", schema)
        text = grammar(name, tool, walker)
        found = [arguments(name, tool, walker, text, random.Random(seed)) for seed in range(WALKS)]
        assert {"a": "<"} in found
        assert all(one["a"] in values for one in found)
        with pytest.raises(Unheld, match="can't be written") as raised:
            grammar(name, ToolSpec("f", "", schema, strict=True), walker)
        assert raised.value.parameter == "a"


@pytest.mark.parametrize("value", ['["</parameter>"]', '["it\'s"]', '["a", "b\\""]'])
def test_the_string_of_an_array_may_hold_the_marker_of_an_end(value: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "array"], "items": {"type": "string"}}}}
    setup = ReaderSetup("seed_oss", tools=("f",), types=parameter_types((ToolSpec("f", "", schema),)))
    text = f"<seed:tool_call>\n<function=f>\n<parameter=a>{value}</parameter>\n</function>\n</seed:tool_call>"
    assert calls_of(read(setup, [[(text, False)]])) == {0: ("f", f'{{"a": {value}}}')}


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
def test_what_can_not_be_held_is_free_unless_the_tool_is_strict(name: str, walker: Walker) -> None:
    overlapping = {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}]}
    many = {"allOf": [{"anyOf": [{"type": "string", "maxLength": n} for n in range(9)]} for _ in range(3)]}
    doubled = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(20)} | {"d20": {"type": "string"}}
    for value, message in (
        (overlapping, "oneOf"),
        (many, "combinations"),
        ({"$ref": "#/$defs/d0"}, "too many"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no value"),
    ):
        schema = {"type": "object", "properties": {"a": value}, "required": ["a"], "$defs": doubled}
        tool = ToolSpec("f", "", schema)
        assert arguments(name, tool, walker, grammar(name, tool, walker), random.Random(1)).keys() == {"a"}
        with pytest.raises(Unheld, match=message) as raised:
            grammar(name, ToolSpec("f", "", schema, strict=True), walker)
        assert raised.value.parameter == "a"


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "lfm2"])
def test_names_of_arguments_are_counted_for_strict_tools(name: str, walker: Walker) -> None:
    for schema in ({"minProperties": 2}, {"properties": {"a": {}, "b": {}}, "maxProperties": 1}):
        with pytest.raises(Unheld, match="Properties"):
            grammar(name, ToolSpec("f", "", {"type": "object", **schema}, strict=True), walker)
        assert grammar(name, ToolSpec("f", "", {"type": "object", **schema}), walker)
