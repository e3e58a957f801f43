"""Step times that are measured after the warm-up: what is timed, and that nothing of it stays."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.runner.conftest import Tiny
from tests.support.capabilities import capabilities
from tests.support.owners import CAN
from treadle.core.messages import Capabilities
from treadle.core.plan import RowFailure, RowTokens, StepPlan, StepResult
from treadle.runner.loading.step_costs import StepCosts, measure
from treadle.runner.model_runner import ModelRunner


class Clocked:
    """A runner whose steps take a second, and whose prompts `token_s` a token more, on a clock of its own."""

    def __init__(self, token_s: float = 0.0, *, fails: bool = False, can: Capabilities = CAN) -> None:
        self.now = 0.0
        self.capabilities = lambda: can
        self.plans: list[StepPlan] = []
        self.held: set[str] = set()
        self._token_s, self._fails = token_s, fails

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.held |= {admit.request.id for admit in plan.admit}
        self.now += (1.0 if plan.decode else 0.0) + self._token_s * sum(chunk.count for chunk in plan.prefill)
        if self._fails:
            return StepResult(failures=tuple(RowFailure(id=row_id, message="no memory") for row_id in self.held))
        return StepResult(rows=tuple(RowTokens(id=row.id, tokens=(7,)) for row in plan.decode))

    def release(self, row_id: str) -> None:
        self.held.discard(row_id)

    def trim_memory(self) -> None:
        assert not self.held


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (16, 16), (200, 64)])
def test_a_step_is_timed_with_all_slots_taken(tiny: Tiny, most: int, rows: int) -> None:
    runner = Clocked()
    found = measure(runner, replace(tiny("llama"), max_running=most), runner.clock)
    assert found.decode_step_s == 1.0
    assert {len(plan.decode) for plan in runner.plans if plan.decode} == {rows}


def test_rows_that_do_not_fit_the_budget_are_not_timed(tiny: Tiny) -> None:
    model = tiny("llama")
    budget = 3 * (model.kv.row_bytes + 257 * model.kv.token_bytes)
    runner = Clocked(can=capabilities(CAN, kv_budget_bytes=budget))
    measure(runner, replace(model, max_running=16), runner.clock)
    assert max(len(plan.decode) for plan in runner.plans) == 3


def test_rows_and_prompts_that_do_not_fit_the_blocks_are_not_timed(tiny: Tiny) -> None:
    runner = Clocked(can=capabilities(CAN, kv_block=32, kv_blocks=5))
    measure(runner, replace(tiny("llama"), max_running=16, context=4096), runner.clock)
    assert max(len(plan.decode) for plan in runner.plans) == 5
    assert max(chunk.count for plan in runner.plans for chunk in plan.prefill) == 64


@pytest.mark.parametrize(("token_s", "longest"), [(0.01, 64), (0.0005, 256), (0.0, 1024)])
def test_prompts_are_timed_by_the_shortest_chunk_that_tells(tiny: Tiny, token_s: float, longest: int) -> None:
    runner = Clocked(token_s)
    found = measure(runner, replace(tiny("llama"), context=4096), runner.clock)
    assert found.prompt_token_s == pytest.approx(token_s)
    assert max(chunk.count for plan in runner.plans for chunk in plan.prefill) == longest


def test_rows_that_fail_leave_their_cost_unknown(tiny: Tiny) -> None:
    runner = Clocked(fails=True)
    assert measure(runner, tiny("llama"), runner.clock) == StepCosts()
    assert not runner.held


def test_what_raises_half_way_leaves_nothing_behind(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2"""
    runner = Clocked()
    calls = itertools.count()
    execute = runner.execute

    def breaks(plan: StepPlan) -> Any:
        result = execute(plan)
        if next(calls) == 1:
            raise RuntimeError("half-way")
        return result

    monkeypatch.setattr(runner, "execute", breaks)
    with pytest.raises(RuntimeError, match="half-way"):
        measure(runner, tiny("llama"), runner.clock)
    assert not runner.held


def test_a_warmed_up_runner_tells_what_steps_take(runner: ModelRunner) -> None:
    assert (runner.capabilities().steps.decode_step_s, runner.capabilities().steps.prompt_token_s) == (0.0, 0.0)
    runner.warm_up()
    assert runner.capabilities().steps.decode_step_s > 0
    assert runner.capabilities().steps.prompt_token_s > 0
