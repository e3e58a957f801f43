"""An owner's whole life on the calling thread."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.capabilities import capabilities
from tests.support.faults import Faults, FaultyRunner, builds
from tests.support.owners import CAN
from treadle.core.capabilities import StepCost
from treadle.core.messages import Failed, FromOwner, Loading, Ready, StepReport, Stop, Stopped, Submit
from treadle.engine.mailbox import Mailbox
from treadle.engine.owner import OwnerLimits, draft_budget, kv_tokens, run_owner, scheduler_for
from treadle.errors import ModelError
from treadle.runner.base import RunnerBroken, RunnerFactory

LIMITS = OwnerLimits(max_running=2, prefill_tokens=64)


def live(build: RunnerFactory, *messages: Any) -> tuple[bool, list[FromOwner]]:
    mailbox = Mailbox()
    for message in (*messages, Stop()):
        mailbox.put(message)
    said: list[FromOwner] = []
    return run_owner(build, LIMITS, mailbox, said.append, lambda: 5.0), said


def test_an_owner_loads_warms_up_serves_and_closes():
    """A1, C1."""
    runner = FaultyRunner()
    clean, said = live(builds(runner))
    assert clean
    assert said[:2] == [Loading(stage="loading the script"), Loading(stage="warming up")]
    assert isinstance(said[2], Ready)
    assert [type(message) for message in said[3:]] == [StepReport, Stopped]
    assert [name for name, _ in runner.threads] == ["build", "warm_up", "close"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelError("the folder is torn: fetch it again"), "the folder is torn: fetch it again"),
        (RunnerBroken("no device"), "no device"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
@pytest.mark.parametrize("where", ["construct", "warm_up", "capabilities"])
def test_a_start_that_fails_says_why_and_nothing_after_it(where, error, message):
    """C1, C2: and what was built is closed."""
    made: list[FaultyRunner] = []

    def build(progress: Any) -> FaultyRunner:
        runner = FaultyRunner.__new__(FaultyRunner)
        if where != "construct":
            made.append(runner)
        runner.__init__(Faults(**{where: error}))  # type: ignore[misc]
        return runner

    clean, said = live(build, Submit(id="a", prompt=(1,), max_tokens=1))
    assert not clean
    assert said[-1] == Failed(code="start_failed", message=message)
    assert not any(isinstance(m, Ready | StepReport | Stopped) for m in said)
    assert [runner.closed for runner in made] == [1] * len(made)


@pytest.mark.parametrize(("error", "logged"), [(ModelError("torn"), "DEBUG"), (ValueError("odd"), "ERROR")])
def test_a_traceback_is_shown_for_what_has_no_explanation_and_else_for_those_who_debug(caplog, error, logged):
    caplog.set_level("DEBUG")
    live(builds(FaultyRunner(Faults(warm_up=error))))
    (record,) = [record for record in caplog.records if record.message == "the engine could not start"]
    assert record.levelname == logged
    assert record.exc_info


def test_a_runner_that_breaks_is_closed_and_failed_is_the_last_word():
    """B7."""
    runner = FaultyRunner(Faults(always=RunnerBroken("lost")))
    said: list[FromOwner] = []
    mailbox = Mailbox()
    mailbox.put(Submit(id="a", prompt=(1,), max_tokens=1))
    assert not run_owner(builds(runner), LIMITS, mailbox, said.append)
    assert said[-1] == Failed(code="engine_died", message="the engine failed and is replaced: lost")
    assert runner.closed == 1


def test_a_close_that_raises_is_logged_and_changes_nothing(caplog):
    clean, said = live(builds(FaultyRunner(Faults(close=ValueError("sticky")))))
    assert clean
    assert isinstance(said[-1], Stopped)
    assert "did not close cleanly" in caplog.text


@pytest.mark.parametrize(
    ("budget", "token", "row", "tokens"), [(0, 8, 0, 0), (1000, 0, 0, 0), (1000, 8, 100, 100), (10, 8, 100, 1)]
)
def test_the_tokens_that_rows_may_hold_together(budget, token, row, tokens):
    can = capabilities(CAN, kv_budget_bytes=budget, kv_token_bytes=token, kv_row_bytes=row)
    assert kv_tokens(can, 2) == tokens


def test_drafts_are_planned_by_measured_costs_only():
    costs = (StepCost(1, 1, 0.1),)
    can = capabilities(CAN, drafters=("lookup",), draft_tokens=4, plain=costs, verifying=costs)
    assert draft_budget(can.steps.speculation) is not None
    measured = scheduler_for(can, LIMITS)
    assert measured.limits.draft_tokens == 4
    unmeasured = capabilities(CAN, drafters=("lookup",), draft_tokens=4)
    assert scheduler_for(unmeasured, LIMITS).limits.draft_tokens == 0
    assert scheduler_for(CAN, LIMITS).limits.draft_tokens == 0


def test_the_tokens_that_fit_into_a_runners_blocks():
    can = capabilities(CAN, kv_block=16, kv_blocks=10, kv_budget_bytes=1, kv_token_bytes=1)
    assert kv_tokens(can, 2) == 160
    limits = scheduler_for(can, LIMITS).limits
    assert (limits.kv_block, limits.kv_blocks, limits.prefix_cache) == (16, 10, False)
