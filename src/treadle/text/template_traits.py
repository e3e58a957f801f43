"""Traits of a chat template, found by rendering small conversations: the forms of tools, calls and system turns that it
writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Turn = Mapping[str, Any]
Render = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]] | None], str]
"""Renders turns and tools with a generation prompt; returns "" where the template fails."""

_WORDS = ("alphaprobe", "betaprobe", "gammaprobe", "deltaprobe")
_KEY, _VALUE, _TOOL, _SECOND = "keyprobe", "valueprobe", "toolprobe", "secondprobe"
_LONG_ID, _SHORT_ID = "call_probe0123456789", "abcdefghi"


class ArgumentsForm(Enum):
    """Forms of a past call's arguments."""

    OBJECT = "object"
    TEXT = "text"
    EITHER = "either"  # an object, and a text that is no JSON


@dataclass(frozen=True)
class TemplateTraits:
    """Forms of a conversation that a template writes.

    `tools`: definitions of tools. `tools_in_system`: definitions in the key `tools` of a system turn, as text
    (Phi-4-mini). `arguments`: the form of past calls' arguments; None where past calls are not written.
    `several_calls`: more than one call in a turn. `text_beside_reasoning`: a turn with calls may have both text and
    reasoning (gpt-oss takes one of them). `results`: turns of role tool. `short_ids`: ids of calls must have nine
    characters (Mistral). `system`: a system turn at the beginning; `several_systems`: more than one there;
    `later_systems`: also between and behind other turns. `user_pairs`, `assistant_pairs`: two turns of that role in a
    row; `call_behind_text`, `user_behind_result`: a turn with a call behind the assistant's text, and a user's turn
    behind the result of a call. Each only counts where the texts keep their order. `probed`: all texts that the probes
    gave.
    """

    tools: bool = False
    tools_in_system: bool = False
    arguments: ArgumentsForm | None = None
    several_calls: bool = True
    text_beside_reasoning: bool = True
    results: bool = False
    short_ids: bool = False
    system: bool = True
    several_systems: bool = True
    later_systems: bool = True
    user_pairs: bool = True
    assistant_pairs: bool = True
    call_behind_text: bool = True
    user_behind_result: bool = True
    probed: str = ""


def probe(render: Render) -> TemplateTraits:
    """Return the traits of a template. One that can't write a single user's turn keeps the defaults."""
    if _WORDS[0] not in render(_turns("user"), None):
        return TemplateTraits()
    seen: list[str] = []

    def recorded(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        seen.append(render(turns, tools))
        return seen[-1]

    system_first = recorded(_turns("system", "user"))
    short_ids = _VALUE not in recorded(_call({_KEY: _VALUE}, _LONG_ID)) and _VALUE not in recorded(_call(_TEXT))
    call_id = _SHORT_ID if short_ids else _LONG_ID
    arguments = _arguments_form(recorded, call_id)
    result = [] if arguments is None else _result(arguments, call_id)
    results = arguments is not None and _in_order(recorded(result), 2)
    return TemplateTraits(
        tools=_TOOL in recorded(_turns("user"), [_tool()]),
        tools_in_system=_TOOL in recorded([{**_turns("system")[0], "tools": _TOOL}, *_turns("user")]),
        arguments=arguments,
        several_calls=arguments is None or _SECOND in recorded(_calls(arguments, call_id)),
        text_beside_reasoning=arguments is None or _WORDS[1] in recorded(_reasoned_call(arguments, call_id)),
        results=results,
        short_ids=short_ids and arguments is not None,
        system=all(word in system_first for word in _WORDS[:2]),
        several_systems=_in_order(recorded(_turns("system", "system", "user")), 3),
        later_systems=_in_order(recorded(_turns("user", "assistant", "system", "user")), 4)
        and _in_order(recorded(_turns("user", "assistant", "user", "system")), 4),
        user_pairs=_in_order(recorded(_turns("user", "user")), 2)
        and _in_order(recorded(_turns("user", "assistant", "user", "user")), 4),
        assistant_pairs=_in_order(recorded(_turns("user", "assistant", "assistant", "user")), 4),
        call_behind_text=arguments is None or _in_order(recorded(_call_behind_text(arguments, call_id)), 3),
        user_behind_result=not results or _in_order(recorded([*result, _turns("", "", "user")[2]]), 3),
        probed="".join(seen),
    )


def least_chats() -> Iterator[tuple[list[Turn], list[dict[str, Any]] | None]]:
    """Yield the shortest chats that a template may ask for: one user's turn, alone, with a system turn, with tools, or
    with both."""
    for tools in (None, [_tool()]):
        yield _turns("user"), tools
        yield _turns("system", "user"), tools


_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'


def _turns(*roles: str) -> list[Turn]:
    return [{"role": role, "content": word} for role, word in zip(roles, _WORDS, strict=False)]


def _tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {_KEY: {"type": "string", "description": "x"}}, "required": [_KEY]}
    return {"type": "function", "function": {"name": _TOOL, "description": "x", "parameters": parameters}}


def _call(arguments: Any, call_id: str = _LONG_ID, **more: Any) -> list[Turn]:
    call = {"id": call_id, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return [*_turns("user"), {"role": "assistant", "content": "", "tool_calls": [call], **more}]


def _calls(arguments: ArgumentsForm, call_id: str) -> list[Turn]:
    user, turn = _call(_given(arguments), call_id)
    (call,) = turn["tool_calls"]
    second = {**call, "id": call_id[::-1], "function": {"name": _SECOND, "arguments": _given(arguments)}}
    return [user, {**turn, "tool_calls": [call, second]}]


def _reasoned_call(arguments: ArgumentsForm, call_id: str) -> list[Turn]:
    return _call(_given(arguments), call_id, content=_WORDS[1], reasoning_content=_WORDS[2])


def _result(arguments: ArgumentsForm, call_id: str) -> list[Turn]:
    result = {"role": "tool", "content": _WORDS[1], "tool_call_id": call_id, "name": _TOOL}
    return [*_call(_given(arguments), call_id), result]


def _call_behind_text(arguments: ArgumentsForm, call_id: str) -> list[Turn]:
    value = {_KEY: _WORDS[2]} if arguments is not ArgumentsForm.TEXT else f'{{"{_KEY}": "{_WORDS[2]}"}}'
    return [*_turns("user", "assistant"), _call(value, call_id)[1]]


def _given(arguments: ArgumentsForm) -> Any:
    return _TEXT if arguments is ArgumentsForm.TEXT else {_KEY: _VALUE}


def _arguments_form(render: Callable[[Sequence[Turn]], str], call_id: str) -> ArgumentsForm | None:
    """Return the form in which arguments become neither Python's notation nor a string within JSON."""
    as_object, as_text = render(_call({_KEY: _VALUE}, call_id)), render(_call(_TEXT, call_id))
    if _VALUE in as_object and f"'{_KEY}'" not in as_object:
        return ArgumentsForm.EITHER if _VALUE in as_text else ArgumentsForm.OBJECT
    return ArgumentsForm.TEXT if _VALUE in as_text else None


def _in_order(rendered: str, count: int) -> bool:
    """Whether the first `count` words are in `rendered`, in order."""
    places = [rendered.find(word) for word in _WORDS[:count]]
    return -1 not in places and places == sorted(places)
