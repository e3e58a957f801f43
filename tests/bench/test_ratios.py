"""Targets side by side: rounds that ran next to each other are compared, and nothing else."""

from __future__ import annotations

import pytest

from treadle.bench.ratios import FigureRow, Range, informative, judge, rows, targets, values
from treadle.bench.samples import Control, Result

from .results import burst, refused, result, round_of, sample


def row(found: Result, name: str) -> FigureRow:
    return next(row for row in rows(found, "burst") if row.figure.name == name)


def test_a_ratio_is_between_rounds_of_the_same_number() -> None:
    found = row(burst(a=[0.1, 0.2, 0.4], b=[0.2, 0.2, 0.2]), "TTFT p50")
    assert found.values == {"a": Range((0.1, 0.2, 0.4)), "b": Range((0.2, 0.2, 0.2))}
    assert found.ratios == {"b": Range((2.0, 1.0, 0.5))}
    assert found.ratios["b"].median == 1.0, "and not the ratio of the medians of rounds that ran apart"


def test_the_order_in_which_rounds_are_kept_changes_nothing() -> None:
    kept = burst(a=[0.1, 0.2], b=[0.2, 0.6])
    turned = result("a", "b", rounds={"burst": kept.rounds["burst"][::-1]})
    assert sorted(row(turned, "TTFT p50").ratios["b"].values) == sorted(row(kept, "TTFT p50").ratios["b"].values)


def test_a_round_that_only_one_has_gives_no_ratio() -> None:
    found = row(burst(a=[0.1, 0.2], b=[0.2]), "TTFT p50")
    assert found.ratios == {"b": Range((2.0,))}


def test_a_target_without_an_answer_has_no_time_and_no_ratio() -> None:
    silent = result("a", "b", rounds={"burst": [round_of("a", 1, sample()), round_of("b", 1, refused())]})
    found = row(silent, "TTFT p50")
    assert set(found.values) == {"a"}
    assert found.ratios == {}
    assert row(silent, "refused").values == {"a": Range((0.0,)), "b": Range((1.0,))}


def test_nothing_is_divided_by_nothing() -> None:
    first = result("a", "b", rounds={"burst": [round_of("a", 1, refused()), round_of("b", 1, sample())]})
    assert row(first, "tok/s").ratios == {}
    assert row(first, "failed").ratios == {}


def test_what_has_no_better_way_has_no_ratio() -> None:
    """The client's own lag is no merit of a server."""
    assert row(burst(a=0.1, b=0.2), "client lag p99").ratios == {}
    assert row(burst(a=0.1, b=0.2), "answered").ratios == {}


def test_only_targets_that_ran_are_there_in_the_result_s_order() -> None:
    found = burst(c=0.1, a=0.2)
    found = result("a", "b", "c", rounds=found.rounds)
    assert targets(found, "burst") == ["a", "c"]
    assert set(row(found, "TTFT p50").ratios) == {"c"}


@pytest.mark.parametrize(
    ("ratios", "better", "said"),
    [
        ((1.5,), "lower", "worse"),
        ((1.5,), "higher", "better"),
        ((0.5, 0.6), "lower", "better"),
        ((1.5, 1.6), "neither", "even"),
        ((1.019,), "lower", "even"),
        ((1.021,), "lower", "worse"),
        ((0.9, 1.5, 1.6), "lower", "even"),
        ((1.0, 1.5, 1.6), "lower", "even"),
    ],
)
def test_rounds_that_disagree_or_hardly_differ_say_nothing(ratios: tuple[float, ...], better: str, said: str) -> None:
    assert judge(Range(ratios), better) == said  # type: ignore[arg-type]


def test_every_figure_is_there_once_and_in_reading_order() -> None:
    looks = [
        Control("/health", 0.0, 0.001, 200),
        Control("/health", 0.1, 5.0, 0),
        Control("/v1/models", 0.0, 0.002, 200),
    ]
    found = values("burst", round_of("a", 1, sample(), sample(0.8), control=looks, lag_s=[0.001]), (2.0, 0.2))
    names = [figure.name for figure, _ in found]
    assert len(names) == len(set(names))
    ordered = [
        entry.figure.name
        for entry in rows(result("a", rounds={"burst": [round_of("a", 1, sample(), control=looks)]}), "burst")
    ]
    assert ordered[0] == "TTFT p50"
    assert ordered[-3:] == ["/health p99", "/v1/models p99", "control looks unanswered"]


def test_a_look_that_was_not_answered_is_counted_and_not_timed() -> None:
    looks = [Control("/health", 0.0, 0.001, 200), Control("/health", 0.1, 5.0, 0)]
    found = dict(values("burst", round_of("a", 1, sample(), control=looks), (2.0, 0.2)))
    by_name = {figure.name: value for figure, value in found.items()}
    assert by_name["/health p99"] == 0.001
    assert by_name["control looks unanswered"] == 1.0


def test_rows_that_say_nothing_are_left_out_of_what_is_told() -> None:
    quiet = {entry.figure.name for entry in informative(rows(burst(a=0.1), "burst"))}
    assert not quiet & {"failed", "incomplete", "refused", "good answers", "TTFT p99", "control looks unanswered"}
    assert quiet >= {"TTFT p50", "TTFT max", "tok/s", "answered"}
    one_bad = result("a", "b", rounds={"burst": [round_of("a", 1, sample()), round_of("b", 1, sample(), refused())]})
    assert {"refused", "good answers"} <= {entry.figure.name for entry in informative(rows(one_bad, "burst"))}


def test_a_workload_without_rounds_has_no_rows() -> None:
    assert rows(result("a", rounds={"burst": []}), "burst") == []


def test_a_workload_s_own_figures_have_their_units() -> None:
    turned_away = refused(retry_after_s=1.0, end_s=0.25)
    waiting = sample(pieces=0, outcome="left")
    found = result("a", rounds={"overload": [round_of("a", 1, turned_away, waiting)]})
    own = {row.figure.name: (row.figure.unit, row.values["a"].median) for row in rows(found, "overload")}
    assert own["refusal p99"] == ("s", 0.25)
    assert own["refusals with Retry-After"] == ("part", 1.0)
    assert own["still waiting at the end"] == ("", 1.0)
