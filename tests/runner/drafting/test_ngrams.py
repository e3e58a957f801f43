"""Indexes of n-grams find what a search through the text does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.runner.drafting import ngrams
from treadle.runner.drafting.ngrams import CANDIDATES, FixedNgrams, GrowingNgrams, N, common_context, key_at

few_letters = st.lists(st.integers(0, 2), min_size=N, max_size=80)
real_ids = st.lists(st.integers(0, 300_000), min_size=N, max_size=20)


def places(text: Sequence[int], gram: Sequence[int], ends: Iterable[int]) -> list[int]:
    """The ends of a gram in a text, latest first."""
    return [end for end in sorted(ends, reverse=True) if list(text[end - N : end]) == list(gram)][:CANDIDATES]


@given(few_letters | real_ids, st.data())
def test_a_fixed_text_is_found_at_its_latest_places(text: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(N, len(text)))
    found = FixedNgrams(text).ends(key_at(text, end))
    assert list(found) == places(text, text[end - N : end], range(N, len(text) + 1))


@given(st.lists(st.integers(0, 2), max_size=N - 1))
def test_a_text_that_is_too_short_has_no_places(text: list[int]) -> None:
    assert list(FixedNgrams(text).ends(key_at([1, 2, 0], N))) == []


@given(few_letters, st.data())
def test_a_growing_text_is_found_at_its_latest_places(text: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    index = GrowingNgrams(start)
    for end in sorted(data.draw(st.lists(st.integers(start, len(text)), max_size=4))):
        index.extend(text, end)
        gram = data.draw(st.integers(N, len(text)))
        known = range(max(start + 1, N), end + 1)
        assert list(index.ends(key_at(text, gram))) == places(text, text[gram - N : gram], known)


@given(few_letters, few_letters, st.integers(0, 8))
def test_the_common_context_is_that_of_the_ends(one: list[int], other: list[int], most: int) -> None:
    same = next(
        n
        for n in range(most, -1, -1)
        if n <= min(len(one), len(other)) and one[len(one) - n :] == other[len(other) - n :]
    )
    assert common_context(one, len(one), other, len(other), most) == same


def test_a_long_fixed_text_is_indexed_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "MOST_INDEXED", 10)
    text = list(range(100))
    index = FixedNgrams(text)
    assert index.nbytes == 8 * 8
    assert list(index.ends(key_at(text, 99))) == [99]
    assert list(index.ends(key_at(text, 92))) == []


def test_a_growing_text_forgets_in_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "GENERATION", 10)
    text = list(range(100))
    index, sizes = GrowingNgrams(0), []
    for end in range(101):
        index.extend(text, end)
        sizes.append(len(index))
    assert max(sizes) < 20
    assert list(index.ends(key_at(text, 95))) == [95]
    assert list(index.ends(key_at(text, 50))) == []
