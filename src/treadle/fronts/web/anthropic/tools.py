"""Reader of tools and of the choice among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ....errors import InvalidRequest, UnsupportedParameter
from ....text.formats.base import AUTO, NONE, REQUIRED, ToolChoice, ToolSpec
from ...field_checks import checked, quoted, require_type
from ...tool_fields import distinct, read_function, tool_items
from .client_tools import client_tool
from .schema import MAX_REPORTED

MODES = {"auto": AUTO, "any": REQUIRED, "tool": REQUIRED, "none": NONE}
SEARCHES = "tool_search_tool_"
"""Beginning of the types of Anthropic's search among deferred tools. All tools are in the prompt here."""


@dataclass(frozen=True)
class Tools:
    """Tools of a request, the places of their schemas in the request, the types of those that are left out, the choice
    among the tools, and whether an answer may have several calls."""

    specs: tuple[ToolSpec, ...]
    places: tuple[str, ...]
    left_out: tuple[str, ...]
    choice: ToolChoice
    parallel: bool


def read_tools(tools: Any, choice: Any) -> Tools:
    """Return the tools and the choice. Raises InvalidRequest and UnsupportedParameter with the place."""
    given = tool_items(tools, "tools")
    read = [(_tool(tool, f"tools[{i}]"), f"tools[{i}].input_schema") for i, tool in enumerate(given)]
    known = [(spec, place) for spec, place in read if spec is not None]
    specs = distinct((spec for spec, _ in known), "tools[{}]")
    places = tuple(place for _, place in known)
    return Tools(specs, places, tuple(searches_in(given)), *_choice(choice, specs))


def searches_in(tools: Any) -> list[str]:
    """Return the types of the tools that are left out: searches among tools."""
    kinds = [tool.get("type") for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    found = dict.fromkeys(kind[:64] for kind in kinds if isinstance(kind, str) and kind.startswith(SEARCHES))
    return list(found)[:MAX_REPORTED]


def _tool(tool: Any, at: str) -> ToolSpec | None:
    """Return a tool; None for one that is left out."""
    require_type(tool, Mapping, "an object with a name and a schema", at)
    kind = checked(tool, "type", str, "a string", at)
    if kind in (None, "custom"):
        return _custom(tool, at)
    if kind.startswith(SEARCHES):
        return None
    found = client_tool(kind)
    if found is None:
        raise UnsupportedParameter(
            f"{at}.type '{kind[:64]}' is not supported here: Anthropic runs this tool on its servers, or it needs "
            "images; leave it out",
            param=f"{at}.type",
        )
    named = read_function({"name": found.name, **tool, "description": None}, at, "input_schema")
    return _with_examples(msgspec.structs.replace(found, name=named.name, strict=named.strict), tool, at)


def _custom(tool: Mapping[str, Any], at: str) -> ToolSpec:
    if tool.get("input_schema") is None:
        place = f"{at}.input_schema"
        raise InvalidRequest(f"{place} is missing: give a JSON Schema, an object", param=place)
    return _with_examples(read_function(tool, at, "input_schema"), tool, at)


def _with_examples(spec: ToolSpec, tool: Mapping[str, Any], at: str) -> ToolSpec:
    """Return the tool with its examples of arguments in its description."""
    examples = checked(tool, "input_examples", list, "an array of objects", at) or []
    for i, example in enumerate(examples):
        require_type(example, Mapping, "an object", f"{at}.input_examples[{i}]")
    if not examples:
        return spec
    listed = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    return msgspec.structs.replace(spec, description=f"{spec.description}\n\nExamples of arguments:\n{listed}".strip())


def _choice(choice: Any, specs: tuple[ToolSpec, ...]) -> tuple[ToolChoice, bool]:
    """Return the choice, and whether an answer may have several calls."""
    if choice is None:
        return ToolChoice(), True
    require_type(choice, Mapping, "an object with a type", "tool_choice")
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in MODES:
        expected = ", ".join(MODES)
        raise InvalidRequest(
            f"tool_choice.type is {quoted(kind, 64)}: it must be one of {expected}", param="tool_choice.type"
        )
    parallel = not checked(choice, "disable_parallel_tool_use", bool, "true or false", "tool_choice")
    name = checked(choice, "name", str, "a string", "tool_choice")
    if kind == "tool":
        return ToolChoice(REQUIRED, (_named(name, specs),), single=True), parallel
    if kind == "any" and not specs:
        raise InvalidRequest("tool_choice.type is 'any' and there are no tools: give some", param="tool_choice.type")
    return ToolChoice(MODES[kind]), parallel


def _named(name: str | None, specs: tuple[ToolSpec, ...]) -> str:
    if not any(spec.name == name for spec in specs):
        given = "missing" if name is None else f"'{name[:64]}'"
        known = ", ".join(spec.name for spec in specs[:8]) or "none"
        raise InvalidRequest(
            f"tool_choice.name is {given}, and no tool has that name: the tools are {known}", param="tool_choice.name"
        )
    return str(name)
