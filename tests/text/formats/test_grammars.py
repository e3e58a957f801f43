"""The grammar of every format against its parser: what a constraint lets a model generate is read as calls with valid
arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from treadle.core.messages import Constraint
from treadle.text.events import CallStart, Event, Malformed, Text
from treadle.text.formats.base import AUTO, NONE, REQUIRED, ToolChoice, ToolSpec
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.registry import FORMATS
from treadle.text.formats.typed_values import parameter_types

from .cuts import cut
from .vectors.vector import calls_of, read
from .walks import Walker

WALKS = 12

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "detailed": {"type": "boolean"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 2, "maxLength": 9},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "range": {"$ref": "#/$defs/range"},
        "near": {"type": ["number", "null"]},
    },
    "required": ["query", "tags"],
    "additionalProperties": False,
    "$defs": {"range": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}},
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (ToolSpec("get_weather", "", CITY), ToolSpec("search", "", SEARCH), ToolSpec("now", "", NOTHING))
ANYTHING = ToolSpec("run", "", {"type": "object"})
SCHEMAS = {tool.name: tool.parameters for tool in (*TOOLS, ANYTHING)}


def special_tokens(name: str) -> tuple[str, ...]:
    """The markers of a format that can be special tokens."""
    tool_format = FORMATS[name]
    return tuple(dict.fromkeys((*tool_format.starts, *tool_format.special)))


def setup(name: str) -> ReaderSetup:
    return ReaderSetup(name, tools=tuple(SCHEMAS), types=parameter_types(TOOLS))


def constraint(name: str, walker: Walker, choice: ToolChoice, *, parallel: bool = True) -> Constraint:
    found = FORMATS[name].constraint(TOOLS, choice, parallel=parallel, special=walker.vocabulary.ids)
    assert found is not None
    return found


def answers(name: str, walker: Walker, found: Constraint) -> list[list[Event]]:
    """Events of random answers, read in random pieces."""
    events = []
    for seed in range(WALKS):
        draw = random.Random(f"{name} {seed}")
        segments = walker.segments(walker.walk(found.grammar, draw))
        events.append(read(setup(name), cut(segments, draw)))
    return events


@pytest.fixture(scope="module", params=["text", "tokens"])
def markers(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def walkers() -> dict[tuple[str, str], Walker]:
    return {}


@pytest.fixture
def walker(name: str, markers: str, walkers: dict[tuple[str, str], Walker]) -> Walker:
    key = ("" if markers == "text" else name, markers)
    return walkers.setdefault(key, Walker() if markers == "text" else Walker(special_tokens(name)))


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value is valid by one of the schemas above."""
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema:
        return value in schema["enum"]
    types = {"null": type(None), "boolean": bool, "integer": int, "number": float, "string": str, "array": list}
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if type(value) is int and "number" in names:
        return True
    if not any(type(value) is {**types, "object": dict}[name] for name in names):
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, list):
        return len(value) <= schema["maxItems"] and all(is_valid(item, schema["items"], root) for item in value)
    if isinstance(value, dict):
        if (properties := schema.get("properties")) is None:
            return True
        return {*schema.get("required", ())} <= value.keys() <= properties.keys() and all(
            is_valid(item, properties[key], root) for key, item in value.items()
        )
    return True


def check(events: list[Event]) -> dict[int, tuple[str, str]]:
    assert not [event for event in events if isinstance(event, Malformed | Text)], events
    found = dict(calls_of(events))
    assert len(found) == sum(isinstance(event, CallStart) for event in events), events
    for name, arguments in found.values():
        assert is_valid(json.loads(arguments), SCHEMAS[name], SCHEMAS[name]), (name, arguments)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_required_answers_are_calls_with_valid_arguments(name: str, walker: Walker) -> None:
    counts = set()
    for events in answers(name, walker, constraint(name, walker, ToolChoice(REQUIRED))):
        counts.add(len(check(events)))
    assert 0 not in counts


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_called_once(name: str, walker: Walker) -> None:
    found = constraint(name, walker, ToolChoice(REQUIRED, ("search",)), parallel=False)
    for events in answers(name, walker, found):
        assert [tool for tool, _ in check(events).values()] == ["search"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_without_a_schema_takes_any_arguments(name: str, walker: Walker) -> None:
    special = walker.vocabulary.ids
    found = FORMATS[name].constraint((ANYTHING,), ToolChoice(REQUIRED), parallel=False, special=special)
    assert found is not None
    arguments = [json.loads(text) for events in answers(name, walker, found) for _, text in check(events).values()]
    assert len(arguments) == WALKS
    assert any(arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_auto_begin_with_a_trigger(name: str, walker: Walker) -> None:
    found = constraint(name, walker, ToolChoice(AUTO))
    assert found.triggers
    assert found.then_free
    for seed in range(WALKS):
        tokens = walker.walk(found.grammar, random.Random(f"{name} {seed}"))
        assert walker.text(tokens).startswith(found.triggers)
        assert check(read(setup(name), [walker.segments(tokens)]))


@pytest.mark.parametrize("name", FORMATS)
def test_auto_with_one_call_ends_behind_it(name: str, walker: Walker) -> None:
    found = constraint(name, walker, ToolChoice(AUTO), parallel=False)
    assert not found.then_free
    for seed in range(WALKS):
        tokens = walker.walk(found.grammar, random.Random(f"{name} {seed}"))
        assert len(check(read(setup(name), [walker.segments(tokens)]))) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_no_tool_may_be_called(name: str) -> None:
    assert FORMATS[name].constraint(TOOLS, ToolChoice(NONE)) is None
    assert FORMATS[name].constraint((), ToolChoice(AUTO)) is None
