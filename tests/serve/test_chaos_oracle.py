"""The chaos' own judgement: its plan follows from its seed, and what is wrong is called so."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.bad import HTTP
from tests.support.chaos.books import wrong_books
from tests.support.chaos.drift import drift
from tests.support.chaos.log import LogReader
from tests.support.chaos.oracle import Oracle, Window
from tests.support.chaos.outcome import End, Outcome
from tests.support.chaos.plan import DEATHS, Fault, Manner, Plan, Request
from tests.support.chaos.recipes import Choice, Recipe

RECIPE = Recipe(0, "short", "x", 3, 0.0, 1)
ANSWER = {0: Choice([1, 2, 3], "length", [-1.0, -2.0, -3.0])}
NOW = 1000.0


def request(manner: Manner = Manner.STREAM, wire: str = "http", **fields: Any) -> Request:
    return Request(1, wire, manner, (RECIPE,), stream=True, after=0.5, **fields)


def outcome(end: End = End.COMPLETE, **fields: Any) -> Outcome:
    whole: dict[str, Any] = {"tokens": {0: [1, 2, 3]}, "finishes": {0: ["length"]}, "dones": 1, "status": "200"}
    fields = (whole if end is End.COMPLETE else {}) | fields
    return Outcome(end, began=NOW, ended=NOW + 1, **fields)


def judged(
    found: Outcome, of: Request | None = None, windows: tuple[Window, ...] = (), *, survives_death: bool = False
) -> list[str]:
    oracle = Oracle({0: ANSWER}, survives_death=survives_death)
    return [*oracle.judge(of or request(), [found], windows), *map(str, oracle.partings)]


DEATH = Window(Fault.KILL, NOW - 5, NOW + 0.5)


@pytest.mark.parametrize(
    ("found", "of"),
    [
        (outcome(), request()),
        (outcome(End.REFUSED, status="503", retry_after_s=2.0), request()),
        (outcome(End.LEFT, tokens={0: [1, 2]}), request(Manner.RST)),
        (outcome(End.NOTHING), request(Manner.HALF_CLOSE)),
        (outcome(End.ABORTED, tokens={0: [1]}, finishes={0: ["abort"]}), request(Manner.ABORT, "mlx")),
        (outcome(End.REJECTED, status="401"), request(Manner.WRONG_KEY)),
        (outcome(End.REJECTED, status="INVALID_ARGUMENT"), request(Manner.TOO_LONG, "vllm")),
        (outcome(End.REJECTED, status=str(HTTP[7][2])), request(Manner.BAD, variant=7)),
        (outcome(End.ERROR, code="engine_step_failed"), request(Manner.RAISES)),
    ],
)
def test_good_ends(found: Outcome, of: Request) -> None:
    assert judged(found, of) == []


@pytest.mark.parametrize(
    ("found", "of", "says"),
    [
        (outcome(dones=2), request(), "more than one end"),
        (outcome(finishes={0: ["length", "length"]}), request(), "more than one end"),
        (outcome(surplus=1), request(), "after the end"),
        (outcome(tokens={0: [1, 9, 3]}), request(), "differs from the calm run at token 1"),
        (outcome(tokens={0: [1, 2]}), request(), "differs from the calm run at token 2"),
        (outcome(finishes={0: ["stop"]}), request(), "ended ['stop']"),
        (outcome(logprobs={0: [-1.0, -2.5]}), request(), "off by 0.500"),
        (outcome(abort_refused="UNAVAILABLE: x"), request(Manner.ABORT, "mlx"), "an Abort was refused"),
        (outcome(tokens={0: [1, 2, 3], 1: [4]}), request(), "choices [0, 1] of 1"),
        (outcome(End.LEFT, tokens={0: [2]}), request(Manner.FIN), "differs"),
        (outcome(End.LEFT), request(), "was not to"),
        (outcome(End.NOTHING), request(), "no end"),
        (outcome(End.UNREACHABLE), request(), "no end"),
        (outcome(End.REFUSED, status="503"), request(), "Retry-After None"),
        (outcome(End.REFUSED, tokens={0: [1]}, retry_after_s=1.0), request(), "after a part"),
        (outcome(End.REJECTED, status="400"), request(), "wanted an answer"),
        (outcome(End.REJECTED, status="500"), request(Manner.BAD), "wanted 400"),
        (outcome(), request(Manner.WRONG_KEY), "wanted 401"),
        (outcome(), request(Manner.RAISES), "a row that raises was answered"),
        (outcome(End.ABORTED, finishes={0: ["abort"]}), request(wire="mlx"), "nobody asked"),
        (outcome(End.ERROR, code="internal_error"), request(), "internal_error"),
    ],
)
def test_bad_ends(found: Outcome, of: Request, says: str) -> None:
    assert any(says in wrong for wrong in judged(found, of))


def test_an_error_is_excused_by_a_death_beside_it_alone() -> None:
    died = outcome(End.ERROR, code="engine_died", tokens={0: [1]})
    assert judged(died)
    assert judged(died, windows=(Window(Fault.KILL, NOW - 5, NOW - 1),))
    assert judged(died, windows=(Window(Fault.RAISE, NOW - 5, NOW + 1),))
    assert judged(died, windows=(DEATH,)) == []
    assert judged(died, windows=(DEATH,), survives_death=True)
    assert judged(outcome(End.NOTHING), windows=(DEATH,))
    assert judged(outcome(End.NOTHING), windows=(Window(Fault.DRAIN, NOW, NOW + 1),)) == []


def test_a_plan_follows_from_its_seed() -> None:
    assert Plan(3).segment(7) == Plan(3).segment(7)
    assert Plan(3).segment(7) != Plan(4).segment(7)
    assert Plan(3).segment(7).requests != Plan(3).segment(8).requests


def test_every_manner_and_every_fault_comes() -> None:
    plan = Plan(0, size=200)
    segments = [plan.segment(i) for i in range(5 * len(DEATHS))]
    manners = {(one.wire == "http", one.manner) for segment in segments for one in segment.requests}
    assert {manner for _, manner in manners} == set(Manner)
    assert {planned.fault for segment in segments for planned in segment.faults} == set(Fault)


def test_faults_that_were_not_asked_for_do_not_come() -> None:
    plan = Plan(0, faults=frozenset((Fault.KILL,)))
    assert {planned.fault for i in range(20) for planned in plan.segment(i).faults} == {Fault.KILL}


def status(**admission: Any) -> dict[str, Any]:
    zeros = {"rows": 0, "tokens_reserved": 0, "running": 0, "waiting": 0, "refused": {}}
    books = {"accepted": 3, "ended": {"length": 2, "unused": 1}}
    return {"admission": zeros | books | admission, "requests": [], "engine": {"restarts": 1}}


METRICS = {'treadle_finished_total{kind="chat",reason="length"}': 2.0, "treadle_engine_restarts_total": 1.0}


@pytest.mark.parametrize(
    ("admission", "metrics", "says"),
    [
        ({"rows": 1}, {}, "rows is 1"),
        ({"tokens_reserved": 9}, {}, "tokens_reserved is 9"),
        ({"accepted": 4}, {}, "4 accepted and 3 ended"),
        ({"refused": {"tokens": 1}}, {}, "refused"),
        ({}, {"treadle_engine_restarts_total": 2.0}, "2.0 restarts"),
        ({}, {'treadle_finished_total{kind="chat",reason="length"}': 1.0}, "finished"),
    ],
)
def test_books_that_do_not_add_up(admission: dict[str, Any], metrics: dict[str, float], says: str) -> None:
    assert wrong_books(status(), METRICS) == []
    (wrong,) = wrong_books(status(**admission), METRICS | metrics)
    assert says in wrong


def test_drift_is_told_from_warm_up_and_noise() -> None:
    warm_up = [10e6, 50e6, 90e6, 99e6]
    steady = drift("server rss", [*warm_up, *(100e6 + i % 3 * 1e5 for i in range(12))])
    growing = drift("server rss", [*warm_up, *(100e6 + i * 1e6 for i in range(12))])
    assert steady is not None
    assert growing is not None
    assert (steady.bad, growing.bad) == (False, True)
    leaking = drift("server fds", [20.0 + i for i in range(16)])
    assert leaking is not None
    assert leaking.bad
    assert drift("server rss", [1.0]) is None


def read(lines: list[str], tmp_path: Path) -> LogReader:
    """A log that said these lines at once."""
    end, begin = os.pipe()
    os.write(begin, "".join(f"{line}\n" for line in lines).encode())
    os.close(begin)
    log = LogReader(end, tmp_path / "log")
    log.join()
    return log


def test_a_log_may_have_the_tracebacks_of_the_chaos_alone(tmp_path: Path) -> None:
    trace = ["Traceback (most recent call last):", '  File "x"', "    call()"]
    log = read([*trace, "ValueError: chaos: a step raised", *trace, "OSError: too many open files", "next"], tmp_path)
    (found,) = log.tracebacks
    assert "too many open files" in found


def test_a_storm_is_more_lines_than_requests_account_for(tmp_path: Path) -> None:
    log = read(["line"] * 400, tmp_path)
    window = int(time.monotonic()) // 5
    assert log.storms(Counter())
    assert log.storms(Counter({window: 200, window - 1: 200})) == []
