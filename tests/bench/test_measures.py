"""Figures of samples that are made up, against what they must come to by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.bench.measures import figures, percentiles, quantile, workload_figures
from treadle.bench.samples import Round, Sample


def sample(id_: str = "1", **given: Any) -> Sample:
    """A whole answer of four pieces: first after 0.4 s, then one every 0.1 s."""
    whole: dict[str, Any] = {"piece_s": [0.4, 0.5, 0.6, 0.7], "end_s": 0.8, "outcome": "ok", "status": 200}
    return Sample(**({"id": id_, "role": "all", "due_s": 0.0, "sent_s": 0.0, **whole, **given}))


def round_of(*samples: Sample, **given: Any) -> Round:
    return Round(target="t", number=1, wall_s=99.0, samples=list(samples), **given)


def refused(end_s: float, retry_after_s: float | None = None, **given: Any) -> Sample:
    return sample(
        outcome="refused", reason="503 busy", piece_s=[], end_s=end_s, retry_after_s=retry_after_s, status=503, **given
    )


LIMITS = (0.5, 0.2)


def test_percentiles_are_values_that_were_seen() -> None:
    ordered = [float(i) for i in range(1, 101)]
    assert [quantile(ordered, q) for q in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 50.0, 90.0, 99.0, 100.0]
    assert percentiles([]) is None
    assert percentiles([None, None]) is None
    seen = percentiles([3.0, None, 1.0, 2.0])
    assert seen is not None
    assert (seen.count, seen.mean, seen.p50, seen.p90, seen.p99, seen.max) == (3, 2.0, 2.0, 3.0, 3.0, 3.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_in_order(values: list[float]) -> None:
    seen = percentiles(values)
    assert seen is not None
    assert min(values) <= seen.p50 <= seen.p90 <= seen.p99 <= seen.max == max(values)


def test_rates_are_over_the_time_from_the_first_sent_to_the_last_ended() -> None:
    """Not over the round's whole time, in which the client may have waited."""
    found = figures(round_of(sample(sent_s=5.0), sample(sent_s=6.2, completion_tokens=6)), LIMITS)
    assert found.tokens == 4 + 6
    assert found.tokens_per_s == pytest.approx(10 / 2.0)
    assert found.requests_per_s == pytest.approx(2 / 2.0)


def test_a_stream_s_rate_is_that_after_its_first_piece() -> None:
    found = figures(round_of(sample(completion_tokens=7), sample(piece_s=[0.4])), LIMITS)
    assert found.stream_tokens_per_s is not None
    assert (found.stream_tokens_per_s.count, found.stream_tokens_per_s.p50) == (1, pytest.approx(6 / 0.3))


def test_waiting_in_the_client_is_told_apart() -> None:
    found = figures(round_of(sample(due_s=1.0, sent_s=4.0)), LIMITS)
    assert found.client_wait is not None
    assert found.ttft is not None
    assert (found.client_wait.max, found.ttft.max) == (3.0, 0.4)


def test_only_whole_answers_have_an_end_to_end_time_and_all_outcomes_are_counted() -> None:
    found = figures(
        round_of(
            sample(),
            sample(outcome="incomplete", reason="broke off", end_s=60.0),
            sample(outcome="failed", reason="500 oops", piece_s=[], end_s=70.0),
            sample(outcome="left", end_s=80.0),
            refused(0.01),
            refused(0.03),
        ),
        LIMITS,
    )
    assert found.answers == {"ok": 1, "incomplete": 1, "failed": 1, "left": 1, "refused": 2}
    assert found.reasons == {"broke off": 1, "500 oops": 1, "503 busy": 2}
    assert found.total is not None
    assert (found.total.count, found.total.max) == (1, 0.8)
    assert found.refusal is not None
    assert found.refusal.max == 0.03
    assert found.ttft is not None
    assert found.ttft.count == 3


@pytest.mark.parametrize(
    ("given", "good"),
    [
        ({}, 1.0),
        ({"piece_s": [0.51, 0.6]}, 0.0),
        ({"piece_s": [0.4, 0.9], "end_s": 0.9}, 0.0),
        ({"piece_s": [0.4, 0.5], "end_s": 0.5, "outcome": "incomplete"}, 0.0),
        ({"piece_s": [], "outcome": "ok"}, 0.0),
    ],
)
def test_goodput_is_what_was_answered_whole_and_within_its_limits(given: dict[str, Any], good: float) -> None:
    found = figures(round_of(sample(**given)), LIMITS)
    assert found.good == good


def test_nothing_seen_is_no_figure_and_no_error() -> None:
    for nothing in (round_of(), round_of(refused(0.0)), round_of(sample(piece_s=[], outcome="failed", end_s=0.0))):
        found = figures(nothing, LIMITS)
        assert (found.ttft, found.gap, found.flatness, found.tokens) == (None, None, None, 0)
        for name in ("burst", "stall", "interactive", "cancel", "mixed-length", "agents", "sweep c=1", "trace x"):
            assert all(math.isfinite(value) for value in workload_figures(name, nothing).values())


def test_roles_are_measured_apart() -> None:
    round_ = round_of(sample(role="short"), sample(role="long", piece_s=[9.0], end_s=9.1))
    short = figures(round_, LIMITS, role="short")
    assert short.ttft is not None
    assert (short.answers, short.ttft.max) == ({"ok": 1}, 0.4)
    assert workload_figures("mixed-length", round_) == {"short TTFT p50 s": 0.4, "long TTFT s": 9.0}


def test_overload_tells_how_fast_and_how_honestly_it_was_refused() -> None:
    """R2, C2"""
    round_ = round_of(
        sample(),
        refused(0.002, 3.0),
        refused(0.004),
        sample(outcome="failed", piece_s=[]),
        sample(outcome="left", piece_s=[]),
        sample(outcome="left"),
    )
    assert workload_figures("overload", round_) == {
        "refusal p99 s": 0.004,
        "refusals with Retry-After": 0.5,
        "neither answered nor refused": 1.0,
        "still waiting at the end": 1.0,
    }


def test_the_kept_share_shows_where_prompts_were_scored() -> None:
    round_ = round_of(sample())
    round_.status = {"sparse scored_tokens": 1000.0, "sparse kept_tokens": 250.0}
    assert workload_figures("chat c=1", round_) == {"prompt tokens kept": 0.25}


def test_speculation_shows_in_every_workload_where_drafts_were_verified() -> None:
    round_ = round_of(sample())
    round_.status = {"draft rows": 10.0, "draft drafted": 40.0, "draft accepted": 30.0}
    assert workload_figures("chat c=1", round_) == {"drafts accepted": 0.75, "tokens a verification": 4.0}
    round_.status = {"draft rows": 0.0, "draft drafted": 0.0, "draft accepted": 0.0}
    assert workload_figures("chat c=1", round_) == {}


def test_agents_tell_what_their_later_turns_cost_and_what_was_reused() -> None:
    """P9"""
    round_ = round_of(
        sample(role="first turn", prompt_tokens=100, cached_tokens=0, piece_s=[1.0]),
        sample(role="later turn", prompt_tokens=300, cached_tokens=200, piece_s=[0.25]),
    )
    assert workload_figures("agents", round_) == {"later turn TTFT / first": 0.25, "prompt tokens reused": 0.5}


def test_idle_gaps_are_those_of_all_decoders_before_and_after() -> None:
    """P3: a machine's speed drifts, and decoders that begin or are left over are not idle ones."""
    early = sample("d0", role="decoder", piece_s=[0.0, 5.0, 5.1, 6.1, 6.3, 7.0])
    late = sample("d1", role="decoder", sent_s=5.0, piece_s=[0.0, 0.1, 1.1, 1.3])
    long = sample("long", role="long", sent_s=5.1, piece_s=[1.0], end_s=1.0)
    found = workload_figures("stall", round_of(early, late, long))
    assert found == pytest.approx(
        {
            "gap p99 / idle gap p99": 5.0,
            "longest gap / idle median": 10.0,
            "rate kept": 0.15,
            "long TTFT s": 1.0,
        }
    )
    assert workload_figures("stall", round_of(sample("d", role="decoder"), long)) == {}


def test_pieces_that_come_at_once_are_no_error() -> None:
    """A server may send several pieces in one packet: gaps of 0, and no ratio to them."""
    decoder = sample("d", role="decoder", piece_s=[0.0, 0.0, 0.0, 5.0, 5.5], end_s=5.5)
    long = sample("long", role="long", sent_s=1.0, piece_s=[5.0], end_s=5.0)
    assert workload_figures("stall", round_of(decoder, long)) == {"rate kept": 0.0, "long TTFT s": 5.0}
    assert workload_figures("burst", round_of(sample(piece_s=[0.0], end_s=0.0))) == {}
