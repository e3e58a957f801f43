"""Bitmasks are filled in parallel where that was measured to be faster (P16)."""

from __future__ import annotations

from treadle.runner.sampling.token_masks import FillTimes


def ways(times: FillTimes, seconds: dict[bool, float], fills: int, rows: int = 8) -> list[bool]:
    """Return the ways of some fills, which take `seconds` each."""
    taken = []
    for _ in range(fills):
        taken.append(times.parallel())
        times.observe(taken[-1], seconds[taken[-1]], rows)
    return taken


def test_both_ways_are_measured_before_one_is_preferred() -> None:
    assert ways(FillTimes(), {False: 1.0, True: 2.0}, 3) == [False, True, False]


def test_the_faster_way_is_taken_and_the_other_one_tried_now_and_then() -> None:
    assert ways(FillTimes(), {False: 1.0, True: 2.0}, 640).count(True) == 11
    assert ways(FillTimes(), {False: 2.0, True: 1.0}, 640).count(False) == 11


def test_the_choice_follows_times_that_change() -> None:
    times = FillTimes()
    ways(times, {False: 1.0, True: 2.0}, 100)
    later = ways(times, {False: 8.0, True: 2.0}, 100)
    assert all(later[50:]) or later[50:].count(False) <= 1


def test_times_count_by_the_row() -> None:
    times = FillTimes()
    times.observe(False, 1.0, rows=1)
    times.observe(True, 4.0, rows=8)
    assert times.parallel()
