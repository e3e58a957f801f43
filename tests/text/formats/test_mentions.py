"""Reasoning that mentions a format's markers: it hides neither the answer behind it nor a call inside it."""

from __future__ import annotations

import random

import pytest

from treadle.text.events import CallStart, Event, Reasoning, Text
from treadle.text.formats.reader import ReaderSetup, Segment
from treadle.text.formats.reasoning import MARKERS
from treadle.text.formats.registry import FORMATS

from .cuts import cut, single_characters
from .vectors import all_vectors
from .vectors.vector import Vector, read

THINK = MARKERS["think"]
FORMATS_IN_MARKERS = [name for name, tool_format in FORMATS.items() if not tool_format.own_reasoning]
WORDS = ("I use ", "it", "\n", " ", *"{[(\"'\\:,=><`", "</", "```json", '{"name": "')
TRIALS = 60


def mention(name: str, draw: random.Random) -> str:
    """Reasoning with a format's markers, and with no tool's name behind them."""
    markers = (*FORMATS[name].starts, *FORMATS[name].special)
    parts = [draw.choice(FORMATS[name].starts if draw.random() < 0.3 else (*WORDS, *markers)) for _ in range(12)]
    return "".join(("So", *parts[: draw.randint(1, 12)], "."))


def check(setup: ReaderSetup, segments: list[Segment], expected: list[Event], draw: random.Random) -> None:
    for pieces in ([segments], single_characters(segments), cut(segments, draw), cut(segments, draw)):
        assert read(setup, pieces) == expected, pieces


@pytest.mark.parametrize("name", FORMATS_IN_MARKERS)
def test_the_answer_behind_reasoning_with_markers_is_visible(name: str) -> None:
    setup = ReaderSetup(name, THINK, opened=True, tools=("find",))
    for seed in range(TRIALS):
        draw = random.Random(f"{name} {seed}")
        inside = mention(name, draw)
        expected: list[Event] = [Reasoning(inside), Text("The answer is 42.")]
        check(setup, [(f"{inside}</think>\nThe answer is 42.", False)], expected, draw)


@pytest.mark.parametrize("name", FORMATS_IN_MARKERS)
def test_reasoning_with_markers_may_stay_open(name: str) -> None:
    setup = ReaderSetup(name, THINK, opened=True, tools=("find",))
    for seed in range(TRIALS):
        draw = random.Random(f"{name} open {seed}")
        inside = mention(name, draw)
        check(setup, [(inside, False)], [Reasoning(inside)], draw)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", FORMATS_IN_MARKERS)
def test_a_call_in_or_behind_reasoning_with_markers_is_read(name: str, forced: bool, closed: bool) -> None:
    vectors = list(filter(is_call_alone, (vector for vector in all_vectors() if vector.setup.format == name)))
    assert vectors
    for seed in range(TRIALS):
        draw = random.Random(f"{name} call {seed}")
        vector, inside = draw.choice(vectors), mention(name, draw)
        setup = ReaderSetup(name, THINK, opened=True, tools=vector.setup.tools, types=vector.setup.types, forced=forced)
        segments = [(f"{inside}{THINK.close if closed else ''}", False), *vector.segments()]
        check(setup, segments, [Reasoning(inside), *vector.events], draw)


def is_call_alone(vector: Vector) -> bool:
    """Whether an answer begins with the marker of a call of a known tool, and is complete."""
    kinds = [type(event).__name__ for event in vector.events]
    starts = [event for event in vector.events if isinstance(event, CallStart)]
    return (
        vector.text.startswith(FORMATS[vector.setup.format or ""].starts)
        and set(kinds) <= {"CallStart", "CallArguments", "CallEnd"}
        and kinds.count("CallStart") == kinds.count("CallEnd") > 0
        and all(start.name in vector.setup.tools for start in starts)
    )
