"""Reader of tools and of the choice among them, in OpenAI's form. Unknown keys are ignored, as in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidRequest, UnsupportedParameter
from ..text.formats.base import AUTO, NONE, REQUIRED, ToolChoice, ToolSpec
from .field_checks import checked, kind_of, quoted, require_array, require_type

MAX_TOOLS = 1024
MAX_DESCRIPTION_CHARS = 64 * 1024
NAME_PATTERN = "[A-Za-z0-9_.-]{1,128}"
_NAME = re.compile(NAME_PATTERN)
_MODES = {NONE: NONE, AUTO: AUTO, REQUIRED: REQUIRED, "any": REQUIRED}


def read_tools(value: Any, param: str = "tools") -> tuple[ToolSpec, ...]:
    """Return the tools of a list of `{"type": "function", "function": {...}}`. Raises InvalidRequest with the place."""
    items = tool_items(value, param)
    return distinct((_function_of(item, f"{param}[{i}]") for i, item in enumerate(items)), f"{param}[{{}}].function")


def read_functions(value: Any, param: str = "functions") -> tuple[ToolSpec, ...]:
    """Return the tools of a list of functions, OpenAI's older form. Raises InvalidRequest with the place."""
    items = tool_items(value, param)
    return distinct((read_function(item, f"{param}[{i}]") for i, item in enumerate(items)), f"{param}[{{}}]")


def read_choice(value: Any, tools: tuple[ToolSpec, ...], param: str = "tool_choice") -> ToolChoice:
    """Return the choice: "none", "auto", "required", a named function (one call), or allowed_tools. Raises
    InvalidRequest."""
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        return _mode(value, tools, param)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} is {kind_of(value)}: {_EXPECTED}", param=param)
    kind = value.get("type")
    if kind == "function":
        return ToolChoice(REQUIRED, (_chosen(value, tools, param),), single=True)
    if kind == "allowed_tools":
        return _allowed(value, tools, param)
    place = f"{param}.type"
    raise InvalidRequest(f"{place} is {quoted(kind, 64)}: it must be 'function' or 'allowed_tools'", param=place)


def read_function_call(value: Any, tools: tuple[ToolSpec, ...], param: str = "function_call") -> ToolChoice:
    """Return the choice of OpenAI's older form: "none", "auto", or `{"name": ...}`. Raises InvalidRequest."""
    if isinstance(value, Mapping):
        return ToolChoice(REQUIRED, (_known(value.get("name"), tools, f"{param}.name"),), single=True)
    return read_choice(value, tools, param)


_EXPECTED = "it must be 'none', 'auto', 'required', or an object that names a function or allowed tools"


# Tools ----------------------------------------------------------------------------------------------------------


def tool_items(value: Any, param: str) -> list[Any]:
    """Return the items of a list of tools; none for null. Raises InvalidRequest."""
    if value is None:
        return []
    require_array(value, param, "tool", MAX_TOOLS, may_be_empty=True)
    items: list[Any] = value
    return items


def distinct(specs: Iterable[ToolSpec], place: str) -> tuple[ToolSpec, ...]:
    """Return the tools. Raises InvalidRequest for two of one name; `place` with a tool's index is its object."""
    found: dict[str, ToolSpec] = {}
    for i, spec in enumerate(specs):
        if spec.name in found:
            at = f"{place.format(i)}.name"
            raise InvalidRequest(f"{at} is '{spec.name}', as an earlier tool's: give each its own name", param=at)
        found[spec.name] = spec
    return tuple(found.values())


def _function_of(item: Any, at: str) -> ToolSpec:
    require_type(item, Mapping, "an object with a type and a function", at)
    kind = item.get("type", "function")
    if kind != "function":
        message = f"{at}.type is {quoted(kind, 64)}, which is not supported here: only functions are"
        raise UnsupportedParameter(message, param=f"{at}.type")
    if "function" not in item:
        raise InvalidRequest(f"{at}.function is missing: give an object with a name", param=f"{at}.function")
    return read_function(item["function"], f"{at}.function")


def read_function(value: Any, at: str, schema: str = "parameters") -> ToolSpec:
    """Return the tool of a function's object at `at`, whose parameters are in the key `schema`. Raises InvalidRequest
    with the place."""
    require_type(value, Mapping, "an object with a name", at)
    name = check_name(value.get("name"), f"{at}.name")
    description = checked(value, "description", str, "a string", at) or ""
    if len(description) > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(
            f"{at}.description has {len(description)} characters: give at most {MAX_DESCRIPTION_CHARS}",
            param=f"{at}.description",
        )
    return ToolSpec(
        name=name,
        description=description,
        parameters=_parameters(value, schema, at),
        strict=bool(checked(value, "strict", bool, "true or false", at)),
    )


_OTHER_TYPES = ("array", "string", "number", "integer", "boolean", "null")


def _parameters(value: Mapping[str, Any], key: str, at: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object; an empty one for a function without a
    schema."""
    schema = checked(value, key, Mapping, "a JSON Schema, an object", at)
    if schema is None:
        return {"type": "object", "properties": {}}
    found = dict(schema)
    kind = found.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds and all(one in _OTHER_TYPES for one in kinds):
        place = f"{at}.{key}.type"
        raise InvalidRequest(
            f"{place} is {quoted(kind, 64)}: it must be 'object', as arguments have names", param=place
        )
    return found


def check_name(name: Any, at: str) -> str:
    """Return a tool's name. Raises InvalidRequest, with its place `at`, for another value."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{at} is {quoted(name, 64)}: it must be 1 to 128 letters, digits, '_', '-' or '.'", param=at
        )
    return name


# The choice -----------------------------------------------------------------------------------------------------


def _mode(value: str, tools: tuple[ToolSpec, ...], param: str) -> ToolChoice:
    if value not in _MODES:
        raise InvalidRequest(f"{param} is {quoted(value, 64)}: {_EXPECTED}", param=param)
    mode = _MODES[value]
    if mode == REQUIRED and not tools:
        raise InvalidRequest(f"{param} is '{value}' and there are no tools: give some", param=param)
    return ToolChoice(mode)


def _chosen(value: Mapping[str, Any], tools: tuple[ToolSpec, ...], at: str) -> str:
    """Return the name in `{"type": "function", "function": {"name": ...}}`, or in the same without `function`."""
    place = f"{at}.function"
    holder: Any = value.get("function")
    if holder is None and "name" in value:
        holder, place = value, at
    require_type(holder, Mapping, "an object with a name", place)
    return _known(holder.get("name"), tools, f"{place}.name")


def _known(name: Any, tools: tuple[ToolSpec, ...], at: str) -> str:
    if not any(tool.name == name for tool in tools):
        raise InvalidRequest(f"{at} is {quoted(name, 64)}, and no tool has that name: {_names(tools)}", param=at)
    return str(name)


def _allowed(value: Mapping[str, Any], tools: tuple[ToolSpec, ...], param: str) -> ToolChoice:
    """Return the choice of `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`."""
    holder, at = value.get("allowed_tools", value), f"{param}.allowed_tools"
    require_type(holder, Mapping, "an object with mode and tools", at)
    mode = holder.get("mode", AUTO)
    if mode not in (AUTO, REQUIRED):
        raise InvalidRequest(f"{at}.mode is {quoted(mode, 64)}: it must be 'auto' or 'required'", param=f"{at}.mode")
    items = tool_items(holder.get("tools"), f"{at}.tools")
    if not items:
        raise InvalidRequest(f"{at}.tools is empty: name at least one tool", param=f"{at}.tools")
    places = [f"{at}.tools[{i}]" for i in range(len(items))]
    return ToolChoice(mode, tuple(_allowed_name(item, tools, place) for item, place in zip(items, places, strict=True)))


def _allowed_name(item: Any, tools: tuple[ToolSpec, ...], at: str) -> str:
    require_type(item, Mapping, "an object that names a function", at)
    return _chosen(item, tools, at)


def _names(tools: tuple[ToolSpec, ...]) -> str:
    if not tools:
        return "there are no tools"
    listed = ", ".join(tool.name for tool in tools[:8])
    return f"there are {listed}" + (", ..." if len(tools) > 8 else "")
