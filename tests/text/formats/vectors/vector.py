"""One answer and its events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treadle.text.events import CallArguments, CallEnd, CallStart, Event, Malformed, Reasoning, Text
from treadle.text.formats.reader import AnswerReader, ReaderSetup, Segment


@dataclass(frozen=True)
class Vector:
    """An answer's text and its merged events. `special`: texts of special tokens; they are segments of their own, and
    `text` may hold more of them than the parser reads."""

    name: str
    setup: ReaderSetup
    text: str
    events: tuple[Event, ...]
    special: tuple[str, ...] = ()

    def segments(self) -> list[Segment]:
        """The answer as segments: special tokens apart from the text between them."""
        if not self.special:
            return [(self.text, False)]
        split = re.split(f"({'|'.join(map(re.escape, self.special))})", self.text)
        return [(part, part in self.special) for part in split if part]


def call(index: int, name: str, arguments: str, *, call_id: str | None = None) -> tuple[Event, ...]:
    """The events of a complete call."""
    return (CallStart(index, name, call_id), CallArguments(index, arguments), CallEnd(index))


def read(setup: ReaderSetup, pieces: Iterable[Sequence[Segment]]) -> list[Event]:
    """The events of an answer that comes in these pieces, merged."""
    reader = AnswerReader(setup)
    events = [event for piece in pieces for event in reader.push(piece)]
    return merged([*events, *reader.finish()])


def merged(events: Iterable[Event]) -> list[Event]:
    """Join neighbours of one kind. A Malformed event's reason is for people: it is left out of comparisons."""
    found: list[Event] = []
    for event in events:
        match found[-1] if found else None, event:
            case Text(before), Text(text):
                found[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(again, delta) if index == again:
                found[-1] = CallArguments(index, before + delta)
            case _, Malformed():
                found.append(Malformed(""))
            case _:
                found.append(event)
    return found


def calls_of(events: Iterable[Event]) -> Mapping[int, tuple[str, str]]:
    """Names and arguments of the complete calls, by index."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    found = {}
    for event in events:
        match event:
            case CallStart(index, name):
                names[index], arguments[index] = name, ""
            case CallArguments(index, delta):
                arguments[index] += delta
            case CallEnd(index):
                found[index] = (names[index], arguments[index])
    return found
