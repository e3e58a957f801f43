"""Finished generations of the library, and what their events come to."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..fronts.generation.pieces import LENGTH
from ..text.events import CallArguments, CallStart, Event, Reasoning

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. `arguments` is its JSON text; `id` is the model's own, or made up where it wrote none."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)

    @property
    def parsed(self) -> Any:
        """The arguments as Python values. Raises ValueError where the call was cut by `max_tokens`."""
        return json.loads(self.arguments)

    def message(self) -> dict[str, Any]:
        """Return the call as chat messages of the assistant have it in `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Completion:
    """A finished generation. `finish_reason` is "stop", "length", or "tool_calls" for an answer with calls; counts are
    in tokens. `cached_tokens` of the prompt's were reused; equal answers may differ in it. `kept_tokens` are those of
    the prompt's that were not left out. `text` is without the `reasoning` and the `tool_calls`."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int = field(default=0, compare=False)
    kept_tokens: int = field(default=0, compare=False)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parse: Callable[[str], Any] | None = field(default=None, compare=False, repr=False)

    @property
    def parsed(self) -> Any:
        """The answer to a request with `json_schema` or `json_object`, as Python values, or as an instance of the type
        that was given. None for other requests, for answers of tool calls, and for one that `max_tokens` cut. Raises
        pydantic.ValidationError where a validator of the type refuses what its schema allows."""
        if self.parse is None or self.finish_reason in (LENGTH, TOOL_CALLS):
            return None
        return self.parse(self.text)

    def message(self) -> dict[str, Any]:
        """Return the answer as the assistant's message of a chat that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


def reasoning_of(events: Iterable[Event]) -> str:
    """Return the reasoning of an answer."""
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls_of(events: Iterable[Event]) -> tuple[ToolCall, ...]:
    """Return the tool calls of an answer, each with all of its arguments."""
    started: list[tuple[CallStart, list[str]]] = []
    for event in events:
        if isinstance(event, CallStart):
            started.append((event, []))
        elif isinstance(event, CallArguments):
            started[event.index][1].append(event.delta)
    return tuple(
        ToolCall(call.name, "".join(arguments), call.id or f"call_{secrets.token_hex(12)}")
        for call, arguments in started
    )
