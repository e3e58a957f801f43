"""Forced calls that the limit cuts: what is left of a call is no text of the answer."""

from __future__ import annotations

import random

import pytest

from treadle.text.events import CallEnd, CallStart, Event, Text
from treadle.text.formats.base import REQUIRED, ToolChoice, ToolSpec
from treadle.text.formats.reader import ReaderSetup
from treadle.text.formats.registry import FORMATS
from treadle.text.formats.typed_values import parameter_types

from .vectors.vector import read
from .walks import Walker

TOOL = ToolSpec("weather", "", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]})


def events(name: str, text: str, *, forced: bool) -> list[Event]:
    setup = ReaderSetup(name, tools=(TOOL.name,), types=parameter_types((TOOL,)), forced=forced)
    return read(setup, [[(char, False)] for char in text])


@pytest.mark.parametrize("name", FORMATS)
def test_the_beginning_of_a_forced_call_is_no_text(name: str) -> None:
    walker = Walker()
    found = FORMATS[name].constraint((TOOL,), ToolChoice(REQUIRED))
    assert found is not None
    text = walker.text(walker.walk(found.grammar, random.Random(name)))
    for length in range(len(text)):
        cut = events(name, text[:length], forced=True)
        assert not [event for event in cut if isinstance(event, Text)], text[:length]
    assert {CallStart, CallEnd} <= set(map(type, events(name, text, forced=True)))


def test_other_text_and_other_answers_keep_their_text() -> None:
    assert events("hermes", "<tool_", forced=False) == [Text("<tool_")]
    assert events("hermes", "Hi <tool_", forced=True) == [Text("Hi <tool_")]
    assert events("hermes", "Hi <tool_call>", forced=True) == [Text("Hi ")]
