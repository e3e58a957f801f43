"""Answers of a megabyte that a hostile prompt may provoke: the time per character stays the same."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from treadle.text.formats.reader import AnswerReader, ReaderSetup
from treadle.text.formats.reasoning import MARKERS
from treadle.text.formats.registry import FORMATS
from treadle.text.formats.spans import VisibleSpans

from .vectors import all_vectors
from .vectors.vector import Vector

SIZE = 1 << 20
PIECE = 4  # characters, as tokens have
FACTOR = 2.0  # a time per character that grows with the length would grow eightfold

BODIES: dict[str, Callable[[str], str]] = {
    "spaces": lambda start: start + " \n",
    "begun markers": lambda start: "<",
    "begun markers of closing": lambda start: "</",
    "quotes": lambda start: '"',
    "backslashes": lambda start: "\\",
    "brackets": lambda start: "[",
    "braces": lambda start: '{"a":',
    "digits": lambda start: "1",
    "starts": lambda start: start,
    "names": lambda start: "a",
    "commas": lambda start: "a,",
}


def seconds(setup: ReaderSetup, head: str, unit: str, size: int) -> float:
    text = (head + unit * (size // len(unit)))[:size]
    reader, started = AnswerReader(setup, VisibleSpans()), time.process_time()
    for place in range(0, size, PIECE):
        reader.push([(text[place : place + PIECE], False)])
    reader.finish()
    return time.process_time() - started


def heads(name: str) -> list[str]:
    """Beginnings of calls: each vector's text up to a few places in it."""
    texts = {vector.text for vector in all_vectors() if vector.setup.format == name and _has_call(vector)}
    longest = max(texts, key=len)
    return ["", *(longest[: len(longest) * part // 4] for part in (1, 2, 3))]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama_pythonic"])
def test_a_call_of_a_megabyte_is_read_in_seconds(name: str) -> None:
    """One format of JSON, one of typed texts, and one of Python literals."""
    setup = ReaderSetup(name, tools=("a", "find", "weather"))
    assert seconds(setup, heads(name)[2], "ab \\n<", SIZE) < 20


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_read_yet_is_short(name: str) -> None:
    """A longer rest would be copied with every token."""
    for head in heads(name):
        for body in BODIES.values():
            reader = AnswerReader(ReaderSetup(name, MARKERS["think"], tools=("a", "find", "weather")))
            reader.push([(head, False)])
            for _ in range(50):
                reader.push([(body(FORMATS[name].starts[0]), False)])
                assert len(reader._scan._text) - reader._scan._at < 100


def _has_call(vector: Vector) -> bool:
    return any(type(event).__name__ == "CallEnd" for event in vector.events)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_megabyte_takes_a_linear_time(name: str, body: str) -> None:
    setup = ReaderSetup(name, MARKERS["think"], tools=("a", "find", "weather"))
    for head in heads(name):
        unit = BODIES[body](FORMATS[name].starts[0])
        small, large = seconds(setup, head, unit, SIZE >> 10), seconds(setup, head, unit, SIZE >> 7)
        if large > 8 * FACTOR * small:  # noise, or a cost that grows
            small, large = seconds(setup, head, unit, SIZE >> 4), seconds(setup, head, unit, SIZE >> 1)
        assert large <= 8 * FACTOR * max(small, 1e-4), (head, small, large)
