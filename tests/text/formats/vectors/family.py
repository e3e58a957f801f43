"""Vectors of one format, written shorter: the tools, the special tokens and the markers of reasoning are shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from treadle.text.events import CallArguments, CallStart, Event
from treadle.text.formats.base import ToolSpec
from treadle.text.formats.reader import AnswerReader, ReaderSetup
from treadle.text.formats.reasoning import MARKERS
from treadle.text.formats.typed_values import parameter_types

from . import vector

STRING: dict[str, Any] = {"type": "string"}
TOOLS = (
    ToolSpec(
        "get_weather",
        parameters={"properties": {"city": STRING, "days": {"type": "integer"}}, "required": ["city"]},
    ),
    ToolSpec(
        "search",
        parameters={
            "properties": {
                "query": STRING,
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "score": {"type": "number"},
                "tags": {"type": "array", "items": STRING},
            },
            "required": ["query"],
        },
    ),
    ToolSpec(
        "write_file",
        parameters={
            "properties": {
                "path": STRING,
                "content": STRING,
                "owner": {"type": ["string", "null"]},
                "meta": {"type": "object", "properties": {"mode": {"type": "integer"}}},
            },
            "required": ["path", "content"],
        },
    ),
    ToolSpec("ping"),
)


@dataclass(frozen=True)
class Vector:
    """An answer's text with special tokens, and its merged events. `opened`: the prompt ends inside the reasoning."""

    name: str
    text: str
    events: tuple[Event, ...]
    opened: bool = False


def family(
    name: str, vectors: Iterable[Vector], *, special: tuple[str, ...] = (), reasoning: str | None = None
) -> list[vector.Vector]:
    """Return the vectors of the format `name`, and the same where its markers are no special tokens."""
    names, types = tuple(tool.name for tool in TOOLS), parameter_types(TOOLS)
    markers = MARKERS[reasoning] if reasoning else None
    found = []
    for one in vectors:
        setup = ReaderSetup(name, markers, opened=one.opened, tools=names, types=types)
        found.append(vector.Vector(one.name, setup, one.text, one.events, special))
        read = AnswerReader(setup).markers
        if any(token in one.text for token in special) and all(token in read for token in special if token in one.text):
            found.append(vector.Vector(f"{one.name}, no special tokens", setup, one.text, one.events))
    return found


def begun(index: int, name: str, arguments: str = "", call_id: str | None = None) -> tuple[Event, ...]:
    """Return the events of a call that was cut off."""
    return (CallStart(index, name, call_id), *((CallArguments(index, arguments),) if arguments else ()))


def call(index: int, name: str, arguments: str, call_id: str | None = None) -> tuple[Event, ...]:
    """Return the events of a complete call."""
    return vector.call(index, name, arguments, call_id=call_id)
