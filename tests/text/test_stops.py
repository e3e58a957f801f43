from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import InvalidRequest
from treadle.text import StopMatch, StopSet, StopStrings

letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=6)


def oracle(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Reference implementation, character by character."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(stops: Sequence[str], chunks: Sequence[str]) -> tuple[str, str | None]:
    matcher, shown = StopStrings(stops), ""
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def cut(text: str, borders: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(b % (len(text) + 1) for b in borders)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(text=letters, stops=stop_lists, borders=st.lists(st.integers(0, 1000), max_size=10))
def test_any_chunking_cuts_where_the_first_stop_is_complete(text: str, stops: list[str], borders: list[int]) -> None:
    assert run(stops, cut(text, borders)) == oracle(text, stops)
    assert run(stops, list(text)) == oracle(text, stops)


@given(text=letters, stops=stop_lists)
def test_only_what_can_still_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopStrings(stops), ""
    for position, char in enumerate(text, 1):
        visible, stop = matcher.push(char)
        if stop is not None:
            return
        shown += visible
        seen = text[:position]
        could = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops)] or [0]
        assert matcher.held == seen[len(seen) - max(could) :]
        assert shown + matcher.held == seen


def test_a_stop_across_chunks_is_never_shown() -> None:
    matcher = StopStrings(["\nUser:"])
    assert matcher.push("Hello\n") == StopMatch("Hello")
    assert matcher.push("Us") == StopMatch("")
    assert matcher.push("er: more") == StopMatch("", "\nUser:")


def test_a_false_start_is_released() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("a ST") == StopMatch("a ")
    assert matcher.push("ONE") == StopMatch("STONE")


def test_the_end_releases_what_was_held() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("ST") == StopMatch("")
    assert matcher.flush() == "ST"
    assert matcher.flush() == ""


def test_a_stop_inside_a_longer_unfinished_one_is_found() -> None:
    assert run(["abcd", "bc"], ["ab", "c"]) == ("a", "bc")


def test_of_stops_complete_at_one_place_the_one_that_starts_earliest_wins() -> None:
    assert run(["bc", "abc"], ["xab", "c"]) == ("x", "abc")


def test_no_stops_hold_nothing() -> None:
    assert StopStrings([]).push("anything") == StopMatch("anything")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        StopStrings(["a", ""])


def test_one_set_serves_many_sequences() -> None:
    stops = StopSet(["END"])
    first, second = StopStrings(stops), StopStrings(stops)
    assert first.push("EN") == StopMatch("")
    assert second.push("D") == StopMatch("D")
    assert first.push("D") == StopMatch("", "END")


def test_hundreds_of_overlapping_stops_over_a_long_text() -> None:
    stops = ["a" * n + "b" for n in range(1, 300)]
    assert run(stops, ["a" * 10_000, "c", "a" * 500 + "b"]) == ("a" * 10_000 + "c" + "a" * 201, "a" * 299 + "b")
