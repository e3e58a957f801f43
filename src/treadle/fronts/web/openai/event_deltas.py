"""Events of an answer in OpenAI's chat format: deltas of a stream, and whole messages."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ....text.events import CallArguments, CallStart, Event, Reasoning, Text


def delta_of(event: Event) -> dict[str, Any] | None:
    """Return the delta of an event; None for one that a stream does not show."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallStart):
        return {"tool_calls": [{"index": event.index, **_call(event)}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]}
    return None


def older_delta_of(event: Event) -> dict[str, Any] | None:
    """Return the delta of an event for a request with `functions`, whose answers have one call."""
    if isinstance(event, CallStart):
        return {"function_call": {"name": event.name, "arguments": ""}} if event.index == 0 else None
    if isinstance(event, CallArguments):
        return {"function_call": {"arguments": event.delta}} if event.index == 0 else None
    return delta_of(event)


def message_of(events: Sequence[Event], *, older_form: bool, forced: bool) -> dict[str, Any]:
    """Return the members of a whole message that its events give. Its content is null where it has no text, and has
    calls or was `forced` to have some."""
    text = "".join(event.text for event in events if isinstance(event, Text))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls = _calls(events)
    message: dict[str, Any] = {"content": text or (None if calls or forced else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls and older_form:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    return message


def _calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    pieces: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append(_call(event))
            pieces.append([])
        elif isinstance(event, CallArguments):
            pieces[event.index].append(event.delta)
    for call, parts in zip(calls, pieces, strict=True):
        call["function"]["arguments"] = "".join(parts)
    return calls


def _call(event: CallStart) -> dict[str, Any]:
    """Return a call without its arguments. Its id is the model's own, where the model wrote one."""
    call_id = event.id or f"call_{secrets.token_hex(12)}"
    return {"id": call_id, "type": "function", "function": {"name": event.name, "arguments": ""}}
