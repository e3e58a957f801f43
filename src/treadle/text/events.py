"""Events of one answer: text, reasoning and tool calls, in the order in which they were generated.

Parsers of model families turn generated text into these events; every dialect encodes them. An event is final: nothing
that was sent is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of tool call number `index` (from 0) of the function `name`. `id`: the call's id where the model wrote
    one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of tool call number `index`. All pieces together are JSON."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """End of tool call number `index`, which is complete. A call without it was cut off."""

    index: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """Output that looked like a tool call and was none; it follows as text. `reason` is for logs and metrics."""

    reason: str


Event = Text | Reasoning | CallStart | CallArguments | CallEnd | Malformed


def ends_with_call(events: Sequence[Event], before: bool = False) -> bool:
    """Whether the last call is complete, behind further `events` of an answer for which that was `before`."""
    last = next((event for event in reversed(events) if isinstance(event, (CallStart, CallEnd))), None)
    return before if last is None else isinstance(last, CallEnd)
