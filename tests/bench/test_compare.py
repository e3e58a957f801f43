"""Whether a run is worse than an earlier one, and when that can't be said."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from treadle.bench.compare import Comparison, FigureCheck, compare
from treadle.bench.errors import BenchError
from treadle.bench.samples import Result, Sample

from .results import burst, info, refused, result, round_of, sample


def failed(comparison: Comparison) -> set[str]:
    return {check.figure.name for check in comparison.checks if not check.passed}


def check(comparison: Comparison, name: str) -> FigureCheck:
    return next(check for check in comparison.checks if check.figure.name == name)


def of(*samples: Sample) -> Result:
    return result("a", rounds={"burst": [round_of("a", 1, *samples)]})


def test_a_run_is_not_worse_than_itself() -> None:
    found = compare(burst(a=[0.1, 0.2], b=0.3), burst(a=[0.1, 0.2], b=0.3))
    assert found.passed
    assert found.notes == []
    assert {check.ratio for check in found.checks if check.a} == {1.0}


def test_a_worsening_over_the_limit_fails_and_one_under_it_passes() -> None:
    assert compare(burst(a=0.400), burst(a=0.436)).passed
    found = compare(burst(a=0.400), burst(a=0.444))
    assert not found.passed
    assert "TTFT p50" in failed(found)
    assert check(found, "TTFT p50").ratio == pytest.approx(1.11)


def test_an_improvement_passes() -> None:
    found = compare(burst(a=0.4), burst(a=0.1))
    assert found.passed
    assert check(found, "TTFT p50").ratio == pytest.approx(0.25)


def test_less_of_what_should_be_much_is_a_worsening() -> None:
    found = compare(of(sample(completion_tokens=100)), of(sample(completion_tokens=80)))
    assert failed(found) == {"tok/s"}
    assert check(found, "tok/s").ratio == pytest.approx(1.25)


def test_a_time_within_noise_passes_whatever_its_ratio() -> None:
    assert compare(of(sample(0.4, gap_s=0.0002)), of(sample(0.4, gap_s=0.0004))).passed
    assert "gap p50" in failed(compare(of(sample(0.4, gap_s=0.002)), of(sample(0.4, gap_s=0.003))))


def test_the_first_failure_ever_fails() -> None:
    found = compare(of(sample(), sample()), of(sample(), sample(outcome="failed", reason="500")))
    assert "failed" in failed(found)
    assert check(found, "failed").ratio is None


def test_one_failure_in_many_rounds_is_not_lost() -> None:
    """The median of failures over three rounds would be 0."""
    fine = [round_of("a", i, sample()) for i in (1, 2, 3)]
    one_bad = [*fine[:2], round_of("a", 3, sample(outcome="failed", reason="500"))]
    found = compare(result("a", rounds={"burst": fine}), result("a", rounds={"burst": one_bad}))
    assert "failed" in failed(found)


def test_a_server_that_refuses_everything_does_not_pass_for_lack_of_figures() -> None:
    assert failed(compare(of(sample()), of(refused()))) >= {"TTFT p50", "gap p50", "total p50", "tok/s"}


def test_own_limits_win_and_may_name_figures_that_have_none() -> None:
    before, after = burst(a=0.4), burst(a=0.5)
    assert "TTFT p50" not in failed(compare(before, after, {"TTFT p50": 1.5}))
    assert "TTFT max" not in failed(compare(before, after))
    assert "TTFT max" in failed(compare(before, after, {"TTFT max": 1.1}))


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ({"TTFT p51": 1.1}, "no figure 'TTFT p51'.*TTFT p50"),
        ({"TTFT p50": 0.9}, "at least 1"),
        ({"TTFT p50": float("nan")}, "at least 1"),
    ],
)
def test_a_limit_that_means_nothing_is_refused(limit: dict[str, float], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        compare(burst(a=0.1), burst(a=0.1), limit)


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "endpoint": ({"endpoint": "completions"}, "endpoint chat and completions"),
    "seed": ({"workloads": {"burst": info(seed=1)}}, "seed of 'burst' 0 and 1"),
    "option": ({"workloads": {"burst": info(options={"c": 8.0})}}, "option c of 'burst' 4 and 8"),
    "one more option": (
        {"workloads": {"burst": info(options={"c": 4.0, "n": 1.0})}},
        "option n of 'burst' none and 1",
    ),
    "digest": ({"workloads": {"burst": info(digest="0ther")}}, "digest of 'burst' d16e57 and 0ther"),
    "goodput": ({"workloads": {"burst": info(goodput=(1.0, 0.1))}}, "goodput of 'burst'"),
    "one more workload": ({"workloads": {"burst": info(), "chat": info()}}, "'chat' is only in the second"),
    "one less workload": ({"workloads": {}}, "'burst' is only in the first"),
}


@pytest.mark.parametrize(("other", "says"), UNLIKE.values(), ids=UNLIKE)
def test_runs_that_are_not_alike_are_refused_with_the_reason(other: dict[str, Any], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        compare(burst(a=0.1), msgspec.structs.replace(burst(a=0.1), **other))


@pytest.mark.parametrize(("part", "value"), [("processor", "Apple M4"), ("cores", 8), ("accelerator", "NVIDIA H200")])
def test_runs_on_other_machines_are_refused(part: str, value: object) -> None:
    here = burst(a=0.1)
    there = msgspec.structs.replace(here, machine=msgspec.structs.replace(here.machine, **{part: value}))
    with pytest.raises(BenchError, match=f"{part} .* and {value}.*on the same machine"):
        compare(here, there)


def test_the_only_target_of_each_run_is_compared_under_whatever_name() -> None:
    found = compare(burst(main=0.4), burst(branch=0.8))
    assert found.notes == ["main is called branch in the second run"]
    assert "TTFT p50" in failed(found)


def test_targets_in_only_one_run_are_left_out_and_noted() -> None:
    found = compare(burst(a=0.1, b=0.1), burst(a=0.1, c=9.9))
    assert found.passed
    assert found.notes == ["b is only in the first run", "c is only in the second run"]
    with pytest.raises(BenchError, match="no target in common"):
        compare(burst(a=0.1, b=0.1), burst(c=0.1, d=0.1))


def test_another_model_or_version_is_noted() -> None:
    before, after = burst(a=0.1), burst(a=0.1)
    after.targets[0].model, after.targets[0].version = "larger", "2"
    before.targets[0].version = "1"
    assert compare(before, after).notes == ["a serves demo and larger", "a is 1 and 2"]


def test_two_runs_without_a_round_do_not_pass() -> None:
    empty = result("a", rounds={"burst": []})
    with pytest.raises(BenchError, match="nothing to compare"):
        compare(empty, empty)
    assert not compare(burst(a=0.1), empty).passed
