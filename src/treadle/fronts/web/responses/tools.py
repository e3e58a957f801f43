"""Reader of tools and of the choice among them, in the form of the Responses API.

Functions and custom tools are served; those of a namespace stand beside the others, under names that begin with it.
Tools that OpenAI runs itself are left out, with a line in the log: a model that is not told of them answers without.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....errors import InvalidRequest, UnsupportedParameter
from ....text.formats.base import AUTO, NONE, REQUIRED, ToolChoice, ToolSpec
from ...field_checks import checked, kind_of, quoted, require_type
from ...log_once import LogOnce
from ...tool_fields import MAX_TOOLS, check_name, read_function, tool_items
from .tool_names import CallName, prompt_name

log = logging.getLogger(__name__)
_hosted_tools = LogOnce(log)

FUNCTION, CUSTOM, NAMESPACE, ALLOWED = "function", "custom", "namespace", "allowed_tools"
HOSTED = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
    *("computer", "computer_use", "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search"),
    "programmatic_tool_calling",
)
DEFINITION = "format.definition"
_MODES = (NONE, AUTO, REQUIRED)
_SYNTAXES = ("lark", "regex")
_EXPECTED = "it must be 'none', 'auto', 'required', or an object that names a tool or allowed tools"


@dataclass
class Tools:
    """Tools of a request. `specs` are those that the model may call, `places` of their schemas in the request; `names`
    are their names in the API, `definitions` the tools as the answer repeats them. `hosted` are the types of tools that
    were left out."""

    specs: list[ToolSpec] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    names: dict[str, CallName] = field(default_factory=dict)
    definitions: list[dict[str, Any]] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)

    def read(self, value: Any, param: str = "tools") -> None:
        """Add the tools of a list. Raises InvalidRequest with the place."""
        for i, tool in enumerate(tool_items(value, param)):
            self._read(tool, f"{param}[{i}]")

    def read_more(self, value: Any, param: str) -> None:
        """Add the tools of a list in the input, without those that are there already."""
        for i, tool in enumerate(tool_items(value, param)):
            new = self._without_known(tool)
            if new is not None:
                self._read(new, f"{param}[{i}]")

    def choice(self, value: Any, param: str = "tool_choice") -> ToolChoice:
        """Return the choice among the tools. Raises InvalidRequest."""
        if value is None:
            return ToolChoice()
        if isinstance(value, str):
            return self._mode(value, param)
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{param} is {kind_of(value)}: {_EXPECTED}", param=param)
        if value.get("type") == ALLOWED:
            return self._allowed(value, param)
        return ToolChoice(REQUIRED, (self._chosen(value, param),), single=True)

    # Tools -------------------------------------------------------------------------------------------------------

    def _without_known(self, tool: Any) -> Any:
        """Return a tool, or a namespace with those of its tools that are new; None where nothing is new."""
        if not isinstance(tool, Mapping):
            return tool
        inner = tool.get("tools")
        if tool.get("type") != NAMESPACE or not isinstance(inner, list):
            return None if self._knows(tool, None) else tool
        new = [one for one in inner if not self._knows(one, tool.get("name"))]
        return {**tool, "tools": new} if new else None

    def _knows(self, tool: Any, namespace: Any) -> bool:
        named = isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
        namespaced = isinstance(namespace, (str, type(None)))
        return named and namespaced and prompt_name(tool["name"], namespace) in self.names

    def _read(self, tool: Any, at: str) -> None:
        kind = _kind(tool, at)
        if kind == FUNCTION:
            self._add_function(tool, at)
        elif kind == CUSTOM:
            self._add_custom(tool, at)
        elif kind == NAMESPACE:
            self._add_namespace(tool, at)
        elif _is_hosted(kind):
            self.hosted.append(kind)
            _report_hosted(kind)
            return
        else:
            raise UnsupportedParameter(
                f"{at}.type '{kind[:40]}' is not supported here: 'function', 'custom' and 'namespace' are",
                param=f"{at}.type",
            )
        self.definitions.append(_repeated(tool))

    def _add_namespace(self, tool: Mapping[str, Any], at: str) -> None:
        name = check_name(tool.get("name"), f"{at}.name")
        for i, inner in enumerate(tool_items(tool.get("tools"), f"{at}.tools")):
            place = f"{at}.tools[{i}]"
            kind = _kind(inner, place)
            if kind not in (FUNCTION, CUSTOM):
                raise InvalidRequest(f"{place}.type is '{kind[:40]}': it must be 'function' or 'custom'", param=place)
            (self._add_function if kind == FUNCTION else self._add_custom)(inner, place, name)

    def _add_function(self, tool: Mapping[str, Any], at: str, namespace: str | None = None) -> None:
        self._add(read_function(tool, at), f"{at}.parameters", at, CallName(tool["name"], namespace))

    def _add_custom(self, tool: Mapping[str, Any], at: str, namespace: str | None = None) -> None:
        name = check_name(tool.get("name"), f"{at}.name")
        description = checked(tool, "description", str, "a string", at) or ""
        syntax, definition = _format(checked(tool, "format", Mapping, "an object", at) or {}, f"{at}.format")
        schema: dict[str, Any] = {"type": "string"}
        if syntax:
            description = f"{description}\n\nThe input follows this {syntax} grammar:\n{definition}".lstrip()
            schema |= {"pattern": f"^(?:{definition})$"} if syntax == "regex" else {}
        spec = ToolSpec(
            name=name,
            description=description,
            parameters={
                "type": "object",
                "properties": {"input": schema},
                "required": ["input"],
                "additionalProperties": False,
            },
            strict="pattern" in schema,
            text_grammar=definition if syntax == "lark" else "",
        )
        self._add(spec, f"{at}.{DEFINITION}", at, CallName(name, namespace, custom=True))

    def _add(self, spec: ToolSpec, place: str, at: str, name: CallName) -> None:
        in_prompt = check_name(prompt_name(spec.name, name.namespace), f"{at}.name")
        if in_prompt in self.names:
            raise InvalidRequest(
                f"{at}.name is '{spec.name}', as an earlier tool's: give each its own name", param=f"{at}.name"
            )
        if len(self.specs) == MAX_TOOLS:
            raise InvalidRequest(f"there are over {MAX_TOOLS} tools: give fewer", param="tools")
        self.names[in_prompt] = name
        self.specs.append(msgspec.structs.replace(spec, name=in_prompt))
        self.places.append(place)

    # The choice --------------------------------------------------------------------------------------------------

    def _mode(self, value: str, param: str) -> ToolChoice:
        if value not in _MODES:
            raise InvalidRequest(f"{param} is '{value[:64]}': {_EXPECTED}", param=param)
        if value == REQUIRED and not self.specs:
            only = f" but {', '.join(self.hosted)}, which this server does not run" if self.hosted else ""
            raise InvalidRequest(f"{param} is 'required' and there are no tools{only}: give some", param=param)
        return ToolChoice(value)

    def _chosen(self, value: Any, at: str) -> str:
        """Return the name in the prompt of the tool that `{"type": ..., "name": ...}` names."""
        kind = _kind(value, at)
        if kind not in (FUNCTION, CUSTOM):
            raise UnsupportedParameter(
                f"{at}.type '{kind[:40]}' is not supported here: this server runs no tools of its own, name a function",
                param=f"{at}.type",
            )
        name, namespace = value.get("name"), checked(value, "namespace", str, "a string", at)
        in_prompt = prompt_name(name, namespace) if isinstance(name, str) else ""
        if in_prompt not in self.names or self.names[in_prompt].custom != (kind == CUSTOM):
            given = quoted(name, 64)
            raise InvalidRequest(
                f"{at}.name is {given}, and no {kind} tool has that name: {self._listed()}", param=f"{at}.name"
            )
        return in_prompt

    def _allowed(self, value: Mapping[str, Any], at: str) -> ToolChoice:
        mode = value.get("mode", AUTO)
        if mode not in (AUTO, REQUIRED):
            raise InvalidRequest(f"{at}.mode must be 'auto' or 'required'", param=f"{at}.mode")
        given = tool_items(value.get("tools"), f"{at}.tools")
        places = [f"{at}.tools[{i}]" for i in range(len(given))]
        served = [pair for pair in zip(given, places, strict=True) if not _is_hosted(_kind(*pair))]
        if not served:
            raise InvalidRequest(f"{at}.tools names no function: name at least one", param=f"{at}.tools")
        return ToolChoice(mode, tuple(self._chosen(tool, place) for tool, place in served))

    def _listed(self) -> str:
        names = list(self.names)
        return f"there are {', '.join(names[:8])}{', ...' * (len(names) > 8)}" if names else "there are no tools"


@contextlib.contextmanager
def about_definition() -> Iterator[None]:
    """Name the definition of a custom tool's grammar in refusals of the schema that was made of it."""
    try:
        yield
    except InvalidRequest as error:
        place, made, _ = (error.param or "").partition(f".{DEFINITION}.")
        if made:
            given = error.param or ""
            error.param = f"{place}.{DEFINITION}"
            error.message = error.message.replace(given, error.param)
        raise


def _kind(tool: Any, at: str) -> str:
    require_type(tool, Mapping, "an object with a type", at)
    kind = tool.get("type")
    require_type(kind, str, "'function', for example", f"{at}.type")
    return str(kind)


def _is_hosted(kind: str) -> bool:
    """Whether OpenAI runs the tools of this type, which may end with a date (`web_search_preview_2025_03_11`)."""
    return kind in HOSTED or kind.rstrip("_0123456789") in HOSTED


def _format(value: Mapping[str, Any], at: str) -> tuple[str, str]:
    """Return the syntax and the definition of a custom tool's grammar; nothing for plain text."""
    kind = value.get("type", "text")
    if kind == "text":
        return "", ""
    if kind != "grammar":
        raise InvalidRequest(f"{at}.type must be 'text' or 'grammar'", param=f"{at}.type")
    syntax, definition = value.get("syntax"), value.get("definition")
    if syntax not in _SYNTAXES:
        raise InvalidRequest(f"{at}.syntax must be 'lark' or 'regex'", param=f"{at}.syntax")
    if not isinstance(definition, str) or not definition:
        raise InvalidRequest(f"{at}.definition is missing: give the grammar, a string", param=f"{at}.definition")
    return syntax, definition


def _repeated(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the answer repeats it: a function with all its keys."""
    if tool["type"] != FUNCTION:
        return dict(tool)
    return {"description": None, "parameters": None, "strict": None, **tool}


def _report_hosted(kind: str) -> None:
    """Log once that tools of a type are left out."""
    _hosted_tools.warn(
        kind[:40],
        "requests have the tool %s, which this server does not run: the model is not told of it; switch it off in the "
        "client, or give it as a function",
        kind[:40],
    )
