"""Figures as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.bench import formatting
from treadle.bench.ratios import Figure, Range


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (None, "s", "–"),
        (0.0, "s", "0 ms"),
        (0.0000042, "s", "0.004 ms"),
        (0.0123, "s", "12.3 ms"),
        (0.9994, "s", "999 ms"),
        (0.9999, "s", "1.00 s"),
        (12.34, "s", "12.3 s"),
        (1234.0, "s", "1,234 s"),
        (66.04, "tok/s", "66.0 tok/s"),
        (1999.6, "tok/s", "2,000 tok/s"),
        (1.094, "x", "1.09"),
        (0.0042, "x", "0.004"),
        (3.0, "", "3"),
        (3.5, "", "3.5"),
        (0.874, "part", "87 %"),
        (0.9996, "part", "99.9 %"),
        (0.0002, "part", "0.1 %"),
        (1.0, "part", "100 %"),
        (0.0, "part", "0 %"),
        (1.064, "part", "106 %"),
    ],
)
def test_a_figure_has_three_digits_and_its_unit(number: float | None, unit: str, text: str) -> None:
    assert formatting.value(number, unit) == text


def test_the_spread_is_told_where_there_is_one() -> None:
    assert formatting.over_rounds(Range((0.010, 0.012, 0.014)), "s") == "12.0 ms (10.0..14.0)"
    assert formatting.over_rounds(Range((0.5, 0.9, 1.4)), "s") == "900 ms (500 ms..1.40 s)"
    assert formatting.over_rounds(Range((0.012, 0.012)), "s") == "12.0 ms"
    assert formatting.over_rounds(Range((2.0,)), "") == "2"
    assert formatting.over_rounds(None, "s") == "–"
    assert formatting.ratio_over_rounds(Range((1.1, 1.0, 1.3))) == "1.10× (1.00..1.30)"
    assert formatting.ratio_over_rounds(None) == "–"


def test_an_arrow_says_which_way_is_better() -> None:
    assert formatting.name(Figure("TTFT p50", "s", "lower")) == "TTFT p50 ↓"
    assert formatting.name(Figure("tok/s", "tok/s", "higher")) == "tok/s ↑"
    assert formatting.name(Figure("refused", "", "neither")) == "refused"


@given(st.text(), st.integers(3, 40))
def test_text_from_outside_is_one_printable_line_no_longer_than_asked(text: str, most: int) -> None:
    line = formatting.printable(text, most)
    assert line.isprintable()
    assert len(line) <= most


def test_a_long_name_keeps_both_its_ends() -> None:
    """Targets often differ in their last words."""
    assert formatting.printable("server --model a --batch 1", 14) == "server --…ch 1"
    assert formatting.printable("\x1b[31mred\n\r\x07") == "[31mred"
