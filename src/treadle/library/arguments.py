"""Arguments of the library's calls: sampling parameters, the form of the answer, tools and reasoning."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import InvalidRequest, one_line
from ..fronts.answer_options import NO_OPTIONS, AnswerOptions, OutputGrammar
from ..fronts.prediction_field import read_prediction
from ..fronts.reasoning_fields import read_reasoning
from ..fronts.tool_fields import read_choice, read_tools
from ..fronts.validate import RawParams
from ..text import check_text

Parse = Callable[[str], Any]

OUTPUTS = {"json_schema": "json_schema", "json_object": "json_object", "regex": "regex"}
OUTPUTS |= {"choice": "choice", "grammar": "lark"}
"""Kinds of grammars by argument."""
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
REASONING = ("enable_thinking", "reasoning_effort", "thinking_budget", "chat_template_kwargs")
SAMPLING = tuple(one.name for one in fields(RawParams))
KNOWN = (*SAMPLING, *OUTPUTS, "close_at_limit", "prediction", *TOOLS, *REASONING)


@dataclass(frozen=True)
class Arguments:
    """Arguments of one call: sampling parameters, options of the answer, variables for the chat template, and the
    parser of an answer in JSON. `for_chats` names an argument that only prompts of chat messages take."""

    params: RawParams
    options: AnswerOptions = NO_OPTIONS
    variables: Mapping[str, Any] = field(default_factory=dict)
    parse: Parse | None = None
    for_chats: str | None = None


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Read the arguments of a call. Raises InvalidRequest with the place."""
    _check_known(given)
    output, parse = _output(given)
    tools = read_tools(given.get("tools"))
    choice = read_choice(given.get("tool_choice"), tools)
    fields_of_reasoning = {name: given.get(name) for name in REASONING[1:3]}
    reasoning = read_reasoning(fields_of_reasoning, _flag(given, "enable_thinking"))
    parallel = _flag(given, "parallel_tool_calls")
    return Arguments(
        params=_params(given),
        options=AnswerOptions(
            tools=tools,
            choice=choice,
            parallel=parallel is not False,
            output=output,
            thinking_budget=reasoning.budget,
            close_at_limit=bool(given.get("close_at_limit")) and bool(tools),
            prediction=_prediction(given.get("prediction")),
        ),
        variables={**reasoning.template_variables(), **_variables(given)},
        parse=parse,
        for_chats=next((name for name in (*TOOLS, *REASONING) if given.get(name) is not None), None),
    )


def _check_known(given: Mapping[str, Any]) -> None:
    if unknown := given.keys() - set(KNOWN):
        name = min(unknown)
        near = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(KNOWN)}"
        raise InvalidRequest(f"unknown argument '{name}'{hint}", param=name)


def _params(given: Mapping[str, Any]) -> RawParams:
    sampling = {name: value for name, value in given.items() if name in SAMPLING}
    stop = sampling.get("stop")
    return RawParams(**{**sampling, "stop": [stop] if isinstance(stop, str) else stop})


def _variables(given: Mapping[str, Any]) -> Mapping[str, Any]:
    value = given.get("chat_template_kwargs")
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest("chat_template_kwargs must be a dict", param="chat_template_kwargs")
    return value or {}


def _flag(given: Mapping[str, Any], name: str) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r:.80}: it must be True or False", param=name)
    return value


def _prediction(value: Any) -> str | None:
    """Return the text that the answer is expected to repeat, given as text or as in the HTTP API; None for none."""
    if value is not None and not isinstance(value, str | Mapping):
        raise InvalidRequest(f"prediction is {value!r:.80}: it must be a text", param="prediction")
    text = value if isinstance(value, str) else read_prediction(value)
    check_text(text or "", param="prediction")
    return text


# The form of the answer -----------------------------------------------------------------------------------------


def _output(given: Mapping[str, Any]) -> tuple[OutputGrammar | None, Parse | None]:
    """Return the grammar that the arguments ask for, and the parser of its answers."""
    close = bool(_flag(given, "close_at_limit"))
    asked = [name for name in OUTPUTS if given.get(name) not in (None, False)]
    if len(asked) > 1:
        raise InvalidRequest(f"{asked[0]} and {asked[1]} both give the answer's form: give one", param=asked[1])
    if not asked:
        return None, None
    spec, parse = _spec(asked[0], given[asked[0]])
    return OutputGrammar(OUTPUTS[asked[0]], spec, asked[0], close), parse


def _spec(name: str, value: Any) -> tuple[Any, Parse | None]:
    if name == "json_object":
        if value is not True:
            raise InvalidRequest(f"json_object is {value!r:.80}: it must be True or False", param=name)
        return None, json.loads
    if name == "json_schema":
        return (value, json.loads) if isinstance(value, dict | bool | str) else _of_type(value)
    return (list(value) if isinstance(value, tuple) else value), None


def _of_type(value: Any) -> tuple[Any, Parse]:
    """Return the JSON Schema of a type that Pydantic knows, and the parser of its instances."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(value)
        return adapter.json_schema(), adapter.validate_json
    except PydanticUserError as error:
        shown = f"json_schema is {value!r:.80}"
        raise InvalidRequest(f"{shown}, which has no JSON Schema: {one_line(error)}", param="json_schema") from None
