"""Halves of surrogate pairs in JSON: replaced, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.text.json_escapes import WholePairs, with_whole_pairs

PIECES = st.sampled_from(
    ["a", "é", '"', "\\\\", '\\"', "\\n", "\\u0041", "\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\udfff", "u", "d"]
)


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("\\ud83d\\ude00", "\\ud83d\\ude00"),
        ("\\uD83D\\uDE00\\ude00", "\\uD83D\\uDE00\\ufffd"),
        ("\\ud83dx\\ude00", "\\ufffdx\\ufffd"),
        ("\\ud83d\\ud83d\\ude00", "\\ufffd\\ud83d\\ude00"),
        ("\\\\ud83d", "\\\\ud83d"),
        ("\\\\\\ud83d", "\\\\\\ufffd"),
        ("\\u00e9", "\\u00e9"),
    ],
)
def test_halves_are_replaced_and_all_else_stays(text: str, mended: str) -> None:
    assert with_whole_pairs(text) == mended


@given(st.lists(PIECES), st.lists(st.integers(1, 7), min_size=1))
def test_pieces_are_mended_as_the_whole_is(parts: list[str], lengths: list[int]) -> None:
    text, pairs, found, place, turn = "".join(parts), WholePairs(), "", 0, 0
    while place < len(text):
        end = place + lengths[turn % len(lengths)]
        found += pairs.feed(text[place:end])
        place, turn = end, turn + 1
        assert len(found) > place - 12, "no more than a pair is held back"
    assert found + pairs.end() == with_whole_pairs(text)
    value = "".join(part for part in parts if part != '"')
    json.loads(f'"{with_whole_pairs(value)}"').encode()


def test_an_escape_that_is_cut_off_is_left_as_it_is() -> None:
    pairs = WholePairs()
    assert (pairs.feed("a\\ud8"), pairs.end(), pairs.feed("3d"), pairs.end()) == ("a", "\\ud8", "3d", "")
