"""Conversations in the forms that a chat template writes: tools, calls, their results, system turns, and neighbours of
one role.

A turn that the template can't write becomes text at the same place. No turn is moved. Neighbours of one role stay apart
where the template takes that, and are one turn elsewhere. Both follow from the template's traits, not from the rest of
the conversation, so that the same beginning is written alike as a conversation grows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .past_calls import arguments_object
from .template_traits import ArgumentsForm, TemplateTraits

Turn = dict[str, Any]
Content = str | list[dict[str, Any]]
WriteCalls = Callable[[Sequence[Mapping[str, Any]]], str]

_RESULT = "_result"
_SHORT_ID_CHARS = 9
_TOOLS_PROMPT = """You can call functions. Each is described by its name and a JSON schema of its parameters:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON, once for each call, in this form:
<tool_call>
{{"name": "function name", "arguments": {{"parameter": "value"}}}}
</tool_call>"""


def forms(
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    traits: TemplateTraits,
    write_calls: WriteCalls,
) -> Iterator[list[Turn]]:
    """Yield the conversation in forms to try, the most faithful first. `write_calls` returns calls as text, for a
    template that writes none.

    Tools and turns that the template never writes are text in all of them: tools are described in the first system
    turn (in its key `tools`, where the template reads that), later system turns and results of calls become turns of
    the user. Neighbours that the template does not take are one turn. Where it refuses that form, all neighbours are
    joined, and in the last form a result without a call becomes text too.
    """
    named = _with_names(turns if traits.several_calls else _with_single_calls(turns))
    if traits.system and not traits.several_systems:
        named = _with_one_system(named)
    if tools and not traits.tools:
        named = _with_system_tools(named, tools) if traits.tools_in_system else _with_tools_prompt(named, tools)
    leading = _leading_systems(named)
    fitted = [_fitted(turn, i, leading, traits, write_calls) for i, turn in enumerate(named)]
    first = _join_neighbours(fitted, traits)
    yield _clean(first)
    joined = _join_neighbours(fitted, _NO_PAIRS)
    if joined != first:
        yield _clean(joined)
    if orphans := _orphans(named):
        texts = [_result_text(named[i]) if i in orphans else turn for i, turn in enumerate(fitted)]
        yield _clean(_join_neighbours(texts, _NO_PAIRS))


def _clean(turns: Sequence[Turn]) -> list[Turn]:
    return [{key: value for key, value in turn.items() if key != _RESULT} for turn in turns]


def _leading_systems(turns: Sequence[Turn]) -> int:
    """Return the number of system turns at the beginning."""
    return next((i for i, turn in enumerate(turns) if turn["role"] != "system"), len(turns))


# Tools and calls ------------------------------------------------------------------------------------------------


def _with_single_calls(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns with one call each: a turn with several becomes several, each before the results of its call."""
    found: list[Turn] = []
    places: dict[str, list[Turn]] = {}  # calls of the last turn that was split, by id: what came of each
    split: list[list[Turn]] = []
    for turn in [*map(dict, turns), {"role": ""}]:
        if split and turn["role"] == "tool":
            _place(turn, places, split).append(turn)
            continue
        found += [part for parts in split for part in parts]
        split = _split_calls(turn)
        places = {parts[-1]["tool_calls"][0]["id"]: parts for parts in split}
        found += [] if split else [turn]
    return found[:-1]


def _split_calls(turn: Turn) -> list[list[Turn]]:
    """Return a turn for each of several calls, in a list of its own; none for a turn with less."""
    first, *others = turn.get("tool_calls") or (None,)
    more: list[Turn] = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in others]
    return [[{**turn, "tool_calls": [first]}], *([one] for one in more)] if more else []


def _place(result: Turn, places: Mapping[str, list[Turn]], split: Sequence[list[Turn]]) -> list[Turn]:
    """Return the list that a result goes to: of its call, or of the first without a result, or else the last."""
    unanswered = next((parts for parts in split if len(parts) == 1), split[-1])
    return places.get(result.get("tool_call_id", ""), split[-1] if "tool_call_id" in result else unanswered)


def _with_names(turns: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns; each result of a call gets the name of its function, where a call before it has its id."""
    names: dict[str, str] = {}
    found = []
    for turn in turns:
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls") or ()}
        name = names.get(turn.get("tool_call_id", "")) if turn["role"] == "tool" else None
        found.append({"name": name, **turn} if name else dict(turn))
    return found


def _with_tools_prompt(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    prompt = _TOOLS_PROMPT.format(tools=listed)
    if turns and turns[0]["role"] == "system":
        return [_append(turns[0], prompt), *turns[1:]]
    return [{"role": "system", "content": prompt}, *turns]


def _with_system_tools(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "tools": listed}, *turns[1:]]
    return [{"role": "system", "content": "", "tools": listed}, *turns]


def _fitted(turn: Turn, index: int, leading: int, traits: TemplateTraits, write_calls: WriteCalls) -> Turn:
    """Return turn `index` in the template's form; the first `leading` turns are system turns."""
    role = turn["role"]
    if role == "system" and not _takes_system(index, leading, traits):
        return {**turn, "role": "user"}
    if role == "tool" and not traits.results:
        return _result_text(turn)
    if turn.get("tool_calls"):
        return _call_text(turn, write_calls) if traits.arguments is None else _with_calls(turn, traits)
    if role == "tool" and traits.short_ids and "tool_call_id" in turn:
        return {**turn, "tool_call_id": _short(turn["tool_call_id"])}
    return turn


def _takes_system(index: int, leading: int, traits: TemplateTraits) -> bool:
    if index == 0:
        return traits.system
    return traits.several_systems if index < leading else traits.later_systems


def _with_calls(turn: Turn, traits: TemplateTraits) -> Turn:
    calls = [_call(call, traits) for call in turn["tool_calls"]]
    if not traits.text_beside_reasoning and turn.get("reasoning_content") and turn["content"]:
        turn = {**turn, "reasoning_content": f"{turn['reasoning_content']}\n\n{_text(turn)}", "content": ""}
    return {**turn, "tool_calls": calls}


def _call(call: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    function = call["function"]
    arguments = _arguments(function["arguments"], traits.arguments)
    call_id = _short(call["id"]) if traits.short_ids else call["id"]
    return {**call, "id": call_id, "function": {**function, "arguments": arguments}}


def _arguments(text: str, form: ArgumentsForm | None) -> Any:
    """Return arguments in the template's form. A text that is no JSON object stays a text, if the template takes it."""
    if form is ArgumentsForm.TEXT:
        return text or "{}"
    value = arguments_object(text)
    if value is None:
        return text if form is ArgumentsForm.EITHER else {"arguments": text}
    return value


def _short(call_id: str) -> str:
    """Return an id of nine letters and digits."""
    if len(call_id) == _SHORT_ID_CHARS and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS]


def _call_text(turn: Turn, write_calls: WriteCalls) -> Turn:
    """Return an assistant's turn with its calls as text."""
    calls = write_calls(turn["tool_calls"])
    return _append({key: value for key, value in turn.items() if key != "tool_calls"}, calls, "\n")


def _result_text(turn: Turn) -> Turn:
    """Return the result of a call as a turn of the user."""
    content = _glued(["<tool_response>\n", turn["content"], "\n</tool_response>"])
    return {"role": "user", "content": content, _RESULT: True}


def _orphans(turns: Sequence[Turn]) -> frozenset[int]:
    """Return the places of results of no call before them. A result without an id belongs to any call."""
    calls: set[str] = set()
    found = set()
    for i, turn in enumerate(turns):
        calls.update(call["id"] for call in turn.get("tool_calls") or ())
        known = turn["tool_call_id"] in calls if "tool_call_id" in turn else bool(calls)
        if turn["role"] == "tool" and not known:
            found.add(i)
    return frozenset(found)


# Joining --------------------------------------------------------------------------------------------------------


_NO_PAIRS = TemplateTraits(user_pairs=False, assistant_pairs=False, call_behind_text=False, user_behind_result=False)


def _with_one_system(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with the system turns at the beginning as one."""
    count = _leading_systems(turns)
    return [*([_as_one(turns[:count])] if count else ()), *turns[count:]]


def _join_neighbours(turns: Sequence[Turn], traits: TemplateTraits) -> list[Turn]:
    """Join neighbours that a template with these traits does not take, and results that became text."""
    groups: list[list[Turn]] = []
    for turn in turns:
        if groups and _belongs(turn, groups[-1], traits):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return [_as_one(group) for group in groups]


def _belongs(turn: Turn, group: Sequence[Turn], traits: TemplateTraits) -> bool:
    """Whether a turn is joined with the group before it, which becomes a turn of its first one's role."""
    match (group[0]["role"], turn["role"]):
        case ("user", "user"):
            return not traits.user_pairs or (_RESULT in turn and _RESULT in group[-1])
        case ("tool", "user"):
            return not traits.user_behind_result
        case ("assistant", "assistant"):
            taken = traits.call_behind_text if turn.get("tool_calls") else traits.assistant_pairs
            return not (taken or group[-1].get("tool_calls"))
    return False


def _as_one(group: Sequence[Turn]) -> Turn:
    """Return a group as one turn of its first one's role, with the texts, the reasoning and the calls of all."""
    first, last = group[0], group[-1]
    if first is last:
        return first
    reasoning = [turn["reasoning_content"] for turn in group if turn.get("reasoning_content")]
    joined = {**first, "content": _joined_content([turn for turn in group if turn["content"]])}
    joined |= {"reasoning_content": "\n\n".join(reasoning)} if reasoning else {}
    return joined | ({"tool_calls": last["tool_calls"]} if last.get("tool_calls") else {})


def _joined_content(turns: Sequence[Turn]) -> Content:
    """Return the turns' contents as one, results apart by a line break and others by an empty line."""
    parts = [turn["content"] for turn in turns[:1]]
    for before, turn in itertools.pairwise(turns):
        parts += ["\n" if _RESULT in before and _RESULT in turn else "\n\n", turn["content"]]
    return _glued(parts)


def _append(turn: Turn, text: str, between: str = "\n\n") -> Turn:
    before = turn["content"]
    return {**turn, "content": _glued([before, between, text] if before and text else [before, text])}


def _glued(contents: Sequence[Content]) -> Content:
    """Return contents as one: a text, or parts where there are images among them."""
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [part for part in parts if part.get("text") != ""]


def _text(turn: Turn) -> str:
    content = turn["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
