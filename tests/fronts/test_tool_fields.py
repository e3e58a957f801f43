"""Tools and the choice among them, as clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.errors import InvalidRequest
from treadle.fronts.tool_fields import MAX_TOOLS, read_choice, read_function_call, read_functions, read_tools
from treadle.text.formats.base import ToolChoice, ToolSpec


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = (ToolSpec("f"), ToolSpec("g"), ToolSpec("h"))


def test_a_tool_has_a_name_and_more() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    given = tool("get_weather.v2", description="The weather.", parameters=schema, strict=True)
    expected = ToolSpec("get_weather.v2", "The weather.", schema, True)
    assert read_tools([given | {"cache_control": {"type": "ephemeral"}}]) == (expected,)
    assert read_functions([given["function"]]) == (expected,)


@pytest.mark.parametrize("given", [tool(), tool(parameters=None)])
def test_a_function_without_parameters_takes_none(given: dict[str, Any]) -> None:
    assert read_tools([given]) == (ToolSpec("f", parameters={"type": "object", "properties": {}}),)
    assert read_tools([tool(parameters={})]) == (ToolSpec("f"),)


@pytest.mark.parametrize("nothing", [None, []])
def test_no_tools_are_none(nothing: Any) -> None:
    assert read_tools(nothing) == read_functions(nothing) == ()


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, "tools"),
        ("f", "tools"),
        ([tool(f"f{i}") for i in range(10_000)], "tools"),
        ([1], "tools[0]"),
        ([tool(), {"type": "web_search"}], "tools[1].type"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([tool("")], "tools[0].function.name"),
        ([tool(None)], "tools[0].function.name"),
        ([tool(5)], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool("a<|im_end|>")], "tools[0].function.name"),
        ([tool("a\n")], "tools[0].function.name"),
        ([tool("ä")], "tools[0].function.name"),
        ([tool("a" * 129)], "tools[0].function.name"),
        ([tool(), tool("g"), tool()], "tools[2].function.name"),
        ([tool(description=5)], "tools[0].function.description"),
        ([tool(description="x" * 70_000)], "tools[0].function.description"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters="{}")], "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
        ([tool(parameters={"type": ["string", "null"]})], "tools[0].function.parameters.type"),
        ([tool(strict="yes")], "tools[0].function.strict"),
    ],
)
def test_a_bad_tool_is_refused_by_its_place(given: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tools(given)
    assert caught.value.param == place
    assert place in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("kind", ["object", ["object", "null"], [], None, "dict"])
def test_types_of_parameters_that_may_be_objects_are_taken(kind: Any) -> None:
    assert read_tools([tool(parameters={"type": kind})])[0].parameters == {"type": kind}


def test_as_many_tools_as_agents_have_are_taken() -> None:
    assert len(read_tools([tool(f"f{i}") for i in range(MAX_TOOLS)])) == MAX_TOOLS


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ("any", ToolChoice("required")),
        (tool("g"), ToolChoice("required", ("g",), single=True)),
        ({"type": "function", "name": "g"}, ToolChoice("required", ("g",), single=True)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("h"), tool("f")]}},
            ToolChoice("required", ("h", "f")),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [tool("h")]}, ToolChoice("auto", ("h",))),
    ],
)
def test_a_choice_is_a_mode_and_names(given: Any, choice: ToolChoice) -> None:
    assert read_choice(given, TOOLS) == choice


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("always", "tool_choice"),
        (5, "tool_choice"),
        ([], "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"),
        (tool("missing"), "tool_choice.function.name"),
        (tool(None), "tool_choice.function.name"),
        ({"type": "function", "name": "missing"}, "tool_choice.name"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none"}}, "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [1]}}, "tool_choice.allowed_tools.tools[0]"),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [tool("f"), tool("x")]}},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
    ],
)
def test_a_bad_choice_is_refused_by_its_place(given: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_choice(given, TOOLS)
    assert caught.value.param == place


@pytest.mark.parametrize(("given", "place"), [("required", "tool_choice"), (tool("f"), "tool_choice.function.name")])
def test_without_tools_none_can_be_forced(given: Any, place: str) -> None:
    with pytest.raises(InvalidRequest, match="there are no tools") as caught:
        read_choice(given, ())
    assert caught.value.param == place
    assert read_choice("auto", ()) == ToolChoice("auto")


def test_the_older_form_names_a_function() -> None:
    assert read_function_call({"name": "g"}, TOOLS) == ToolChoice("required", ("g",), single=True)
    assert read_function_call("none", TOOLS) == ToolChoice("none")
    with pytest.raises(InvalidRequest) as caught:
        read_function_call({"name": "x"}, TOOLS)
    assert caught.value.param == "function_call.name"
    assert "f, g, h" in caught.value.message
