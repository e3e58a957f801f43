"""A whole run: targets in turn, what is written down, and when a run is given up."""

from __future__ import annotations

import functools
import shlex
import sys
from typing import Any

import pytest

from tests.support import fake_openai
from tests.support.aio import in_loop
from tests.support.fake_openai import fake_server
from treadle.bench.errors import BenchError
from treadle.bench.measures import Percentiles
from treadle.bench.run import Plan, run
from treadle.bench.samples import Round, Sample
from treadle.bench.workloads import build, digest


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"silence_s": 0.0}, "--silence 0"),
        ({"start_timeout_s": -1.0}, "--start-timeout -1"),
        ({"max_lag_s": -1.0}, "--max-lag -1"),
    ],
)
@in_loop
async def test_times_that_can_not_be_are_refused_by_their_flags(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        await run(Plan(SMALL, urls=("http://127.0.0.1:1",), **given), Notes())


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str, int, int]] = []
        self.samples: list[Sample] = []
        self.ended: list[Round] = []

    def begin(self, workload: str, target: str, round_: int, total: int) -> None:
        self.begun.append((workload, target, round_, total))

    def sample(self, sample: Sample) -> None:
        self.samples.append(sample)

    def end(self, round_: Round) -> None:
        self.ended.append(round_)


planned = functools.partial(Plan, max_lag_s=60.0)  # a busy machine is no failure here
BURST = "burst c=1 every_s=0.001 tokens=3"
CHAT = "chat c=1 each=1 prompt=3 tokens=2"
SMALL = [build("burst", 0, {"c": 1, "every_s": 0.001, "tokens": 3})]
STATUS: dict[str, Any] = {
    "admission": {"rows": 0},
    "engine": {"restarts": 0, "statistics": {"prompt_tokens": 30, "completion_tokens": 4}},
}


@in_loop
async def test_targets_are_measured_in_turn_and_everything_is_written_down() -> None:
    """F11"""
    watcher, kept = Notes(), list[list[int]]()
    names: dict[str, dict[str, float]] = {
        "burst": {"c": 1, "every_s": 0.001, "tokens": 3},
        "chat": {"c": 1, "each": 1, "prompt": 3, "tokens": 2},
    }
    rounds = [[build(name, 0, given, round_=i)[0] for name, given in names.items()] for i in (1, 2)]
    with fake_server(status=STATUS) as a, fake_server(models=("other",)) as b:
        plan = planned(rounds, urls=(a.url, b.url), names=("a", "b"))
        result = await run(plan, watcher, lambda so_far: kept.append([*map(len, so_far.rounds.values())]))
        asked = [body["messages"][0]["content"] for body in a.asked]
        assert len({text for text in asked if asked.count(text) == 1}) == 1 + 2 * (4 + 1)
        assert asked == [body["messages"][0]["content"] for body in b.asked]
    turns = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert watcher.begun == [(BURST, t, n, 4) for t, n in turns] + [(CHAT, t, n, 1) for t, n in turns]
    assert [(round_.target, round_.number) for round_ in result.rounds[BURST]] == turns
    assert watcher.ended == [*result.rounds[BURST], *result.rounds[CHAT]]
    assert len(watcher.samples) == 2 * 2 * (4 + 1)
    assert {s.outcome for s in watcher.samples} == {"ok"}
    assert [(t.name, t.model) for t in result.targets] == [("a", "fake"), ("b", "other")]
    assert result.workloads[BURST].digest == digest(rounds[0][0], rounds[1][0])
    assert kept == [[2], [4], [4, 2], [4, 4]]
    first, second = result.rounds[BURST][:2]
    assert (first.status["completion_tokens"], first.status["rows_left"], second.status) == (0.0, 0.0, {})
    assert {look.path for look in first.control} == {"/v1/models"}


@in_loop
async def test_warm_up_is_not_measured() -> None:
    watcher = Notes()
    with fake_server() as server:
        await run(planned(SMALL, urls=(server.url,), warm_up=2), watcher)
        small = [body for body in server.asked if body["max_tokens"] != 3]
    assert (len(small), len(watcher.samples)) == (3, 4)


@in_loop
async def test_targets_of_one_name_are_told_apart() -> None:
    with fake_server() as server:
        result = await run(planned(SMALL, urls=(server.url, server.url)), Notes())
    names = [target.name for target in result.targets]
    assert [name.split()[-1] for name in names] == ["1", "2"]
    assert [round_.target for round_ in result.rounds[BURST]] == names


@in_loop
async def test_names_that_are_not_one_each_are_refused() -> None:
    with fake_server() as server, pytest.raises(BenchError, match="--name x is there twice"):
        await run(planned(SMALL, urls=(server.url, server.url), names=("x", "x")), Notes())


@in_loop
async def test_a_run_whose_client_was_too_slow_is_given_up() -> None:
    """F11: the client must not be what is measured."""
    slow = build("burst", 0, {"c": 1, "every_s": 0.02, "tokens": 3})
    with fake_server() as server, pytest.raises(BenchError, match="the client was the bottleneck"):
        await run(planned([slow], urls=(server.url,), max_lag_s=0.0), Notes())


@in_loop
async def test_a_run_that_is_given_up_says_why_and_after_how_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    late = iter([0.0, 5.0])
    monkeypatch.setattr("treadle.bench.run.percentiles", lambda _: Percentiles(1, *[next(late)] * 5))
    kept: list[tuple[str, int, int]] = []
    with fake_server() as server, pytest.raises(BenchError):
        await run(
            planned([SMALL[0]] * 3, urls=(server.url,), max_lag_s=1.0),
            Notes(),
            lambda so_far: kept.append((so_far.stopped[:29], so_far.rounds_done, so_far.rounds_planned)),
        )
    assert kept == [("", 1, 3), ("the client was the bottleneck", 1, 3)]


@in_loop
async def test_nothing_to_measure_is_told() -> None:
    with pytest.raises(BenchError, match="give --url URL or --start COMMAND"):
        await run(planned(SMALL), Notes())


@in_loop
async def test_two_workloads_of_one_name_are_refused() -> None:
    with fake_server() as server, pytest.raises(BenchError, match=f"workload '{BURST}' is there twice"):
        await run(planned([SMALL[0] * 2], urls=(server.url,)), Notes())


@in_loop
async def test_broken_answers_are_counted_not_raised() -> None:
    """F11, B4"""
    watcher = Notes()
    with fake_server() as server:
        plan = planned(SMALL, urls=(server.url,), warm_up=0)
        watcher.begin = lambda *_: setattr(server, "breaks", True)  # type: ignore[method-assign]
        result = await run(plan, watcher)
    assert {s.outcome for s in result.rounds[BURST][0].samples} == {"incomplete"}


@in_loop
async def test_a_server_that_dies_in_a_round_is_noted_and_started_again_for_the_next() -> None:
    """F11: how often a server died is a figure too."""
    command = f"{shlex.quote(sys.executable)} {shlex.quote(fake_openai.__file__)} --die-after 4"
    result = await run(planned(SMALL * 2, starts=(command,), warm_up=0), Notes())
    first, second = result.rounds[BURST]
    for round_ in (first, second):
        assert round_.crash == "ended with SIGKILL: it said nothing"
        assert [s.outcome for s in round_.samples].count("ok") == 3
        assert {s.outcome for s in round_.samples} == {"ok", "failed"}
