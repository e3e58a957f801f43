"""Every vector of every format, in one piece and cut at random: the events are the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from treadle.text.formats.reader import Segment
from treadle.text.formats.registry import FORMATS

from .cuts import cut, single_characters
from .vectors import all_vectors
from .vectors.vector import Vector, read

CUTS = 50
VECTORS = all_vectors()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v.setup.format}: {v.name}")
def test_an_answer_gives_its_events(vector: Vector) -> None:
    assert read(vector.setup, [vector.segments()]) == list(vector.events)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v.setup.format}: {v.name}")
def test_cuts_do_not_change_the_events(vector: Vector) -> None:
    draw = random.Random(vector.name)
    segments = vector.segments()
    assert read(vector.setup, single_characters(segments)) == list(vector.events)
    for _ in range(CUTS):
        assert read(vector.setup, cut(segments, draw)) == list(vector.events)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_vectors(name: str) -> None:
    assert sum(vector.setup.format == name for vector in VECTORS) >= 5


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_documented(name: str) -> None:
    docs = Path(__file__).parents[3] / "docs" / "tools.md"
    assert f"`{name}`" in docs.read_text(encoding="utf-8")


def test_cuts_lose_nothing() -> None:
    segments: list[Segment] = [("abc", False), ("<|x|>", True), ("def", False)]
    for seed in range(20):
        pieces = cut(segments, random.Random(seed))
        assert "".join(text for piece in pieces for text, _ in piece) == "abc<|x|>def"
        assert ("<|x|>", True) in [segment for piece in pieces for segment in piece]
