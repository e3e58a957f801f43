"""Reader of a conversation: from messages and the system prompt to the turns that a chat template renders.

Every turn keeps its place, system turns in mid-conversation too, so that the prompt of the next request begins with
this one's: that part of it is cached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import InvalidRequest
from ...chat_messages import MAX_CALLS, MAX_MESSAGES
from ...field_checks import checked, quoted, require_array, require_type
from .blocks import TEXT, Block, Content, joined, pieces_of, read_blocks, refused, required, text_of
from .signatures import unsealed
from .tool_ids import id_for_model

Turn = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
BILLING = "x-anthropic-billing-header:"
"""Beginning of a system block that Claude Code writes for Anthropic's billing. It changes from session to session, and
is not for the model."""


def read_conversation(messages: Any, system: Any) -> tuple[list[Turn], bool]:
    """Return the turns, and whether the answer continues the last one. Raises InvalidRequest and UnsupportedParameter,
    with the place in the request."""
    require_array(messages, "messages", "message", MAX_MESSAGES)
    turns = _system_turns(system)
    runs = _runs(messages)
    for role, blocks in runs:
        turns += _TURNS[role](blocks)
    return _beginning(turns, ends_with_answer=runs[-1][0] == "assistant")


def _beginning(turns: list[Turn], *, ends_with_answer: bool) -> tuple[list[Turn], bool]:
    """Return the turns, and whether the last is the beginning of the answer: one without calls. An empty beginning is
    left out."""
    if not ends_with_answer:
        return turns, False
    last = turns[-1]
    if "tool_calls" in last:
        return turns, False
    if not last["content"] and "reasoning_content" not in last:
        return turns[:-1], False
    return turns, bool(last["content"])


def _runs(messages: Sequence[Any]) -> list[tuple[str, list[Block]]]:
    """Return the blocks of successive messages of one role, with that role: Anthropic joins them to one turn."""
    runs: list[tuple[str, list[Block]]] = []
    for i, message in enumerate(messages):
        role, blocks = _message(message, f"messages[{i}]")
        if runs and runs[-1][0] == role and role != "system":
            runs[-1][1].extend(blocks)
        else:
            runs.append((role, blocks))
    return runs


def _message(message: Any, at: str) -> tuple[str, list[Block]]:
    require_type(message, Mapping, "an object with a role and content", at)
    role = message.get("role")
    if role not in ROLES:
        expected = ", ".join(ROLES)
        raise InvalidRequest(f"{at}.role is {quoted(role)}: it must be one of {expected}", param=f"{at}.role")
    role = "system" if role == "developer" else str(role)
    return role, read_blocks(message.get("content"), f"{at}.content", may_be_empty=role == "assistant")


def _system_turns(system: Any) -> list[Turn]:
    """Return the turn of the request's system prompt; none where it is empty."""
    if system is None:
        return []
    return [turn for turn in _system(read_blocks(system, "system", may_be_empty=True)) if turn["content"]]


def _system(blocks: Sequence[Block]) -> list[Turn]:
    for block in blocks:
        if block.kind != TEXT:
            raise refused(block)
    texts = [text_of(block) for block in blocks]
    return [{"role": "system", "content": joined(text for text in texts if not text.startswith(BILLING))}]


def _user(blocks: Sequence[Block]) -> list[Turn]:
    """Return the turns of a user's blocks: a turn for each result of a call, and one for the text and the images
    between them."""
    turns: list[Turn] = []
    others: list[Block] = []
    for block in blocks:
        if block.kind == "tool_result":
            turns += _user_turn(others)
            others = []
            turns.append(_result(block))
        else:
            others.append(block)
    return turns + _user_turn(others)


def _user_turn(blocks: Sequence[Block]) -> list[Turn]:
    return [{"role": "user", "content": pieces_of(blocks)}] if blocks else []


def _result(block: Block) -> Turn:
    """Return the turn of a result. Templates have no mark for a failed call: its text begins with "Error"."""
    content = pieces_of(read_blocks(block.value.get("content"), f"{block.at}.content", may_be_empty=True))
    if checked(block.value, "is_error", bool, "true or false", block.at):
        content = _failed(content)
    return {"role": "tool", "tool_call_id": id_for_model(required(block, "tool_use_id")), "content": content}


def _failed(content: Content) -> Content:
    if isinstance(content, str):
        return f"Error: {content}" if content else "Error"
    return [{"type": TEXT, "text": "Error: "}, *content]


def _assistant(blocks: Sequence[Block]) -> list[Turn]:
    """Return the one turn of an assistant's blocks."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if block.kind == "thinking":
            reasoning.append(_thinking(block))
        elif block.kind == "tool_use":
            calls.append(_call(block))
        elif block.kind != "redacted_thinking":  # encrypted by another server: nobody can read it
            texts.append(text_of(block))
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(
            f"{blocks[0].at} and on are {len(calls)} calls: give at most {MAX_CALLS}", param="messages"
        )
    turn: Turn = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        turn["reasoning_content"] = "".join(reasoning)
    return [{**turn, "tool_calls": calls} if calls else turn]


def _thinking(block: Block) -> str:
    """Return the text of an earlier answer's reasoning: the block's own, or the one that its signature holds."""
    signature = checked(block.value, "signature", str, "a string", block.at) or ""
    return required(block, "thinking") or unsealed(signature)


def _call(block: Block) -> dict[str, Any]:
    given = checked(block.value, "input", Mapping, "an object", block.at)
    arguments = json.dumps(given or {}, ensure_ascii=False)
    name = required(block, "name")
    if not name:
        raise InvalidRequest(f"{block.at}.name is empty: give the tool's name", param=f"{block.at}.name")
    return {
        "id": id_for_model(required(block, "id")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


_TURNS = {"user": _user, "assistant": _assistant, "system": _system}
