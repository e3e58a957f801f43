"""Step times that are measured after the warm-up: what is timed, and that nothing of it stays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.runner.backends import configured
from tests.runner.conftest import Tiny
from tests.support.capabilities import capabilities
from tests.support.owners import CAN
from tests.support.scripted_drafter import ScriptedDrafter
from treadle.core.capabilities import Capabilities, SpeculationCapabilities, StepCost
from treadle.core.plan import RowFailure, RowTokens, StepPlan, StepResult
from treadle.runner.loading import draft_costs
from treadle.runner.loading.draft_costs import choose_launches
from treadle.runner.loading.step_costs import StepCosts, measure
from treadle.runner.model_runner import ModelRunner


class Clocked:
    """A runner whose steps take `step_s` and a tenth of it a draft token, and whose prompts `token_s` a token more, on
    a clock of its own."""

    def __init__(
        self, token_s: float = 0.0, *, step_s: float = 1.0, fails: bool = False, can: Capabilities = CAN
    ) -> None:
        self.now = 0.0
        self.capabilities = lambda: can
        self.plans: list[StepPlan] = []
        self.held: set[str] = set()
        self._token_s, self._fails = token_s, fails
        self._step_s = step_s
        self._started: list[StepPlan] = []
        self.filled = False

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.held |= {admit.request.id for admit in plan.admit}
        drafts = sum(row.drafts for row in plan.decode)
        assert self.filled or not drafts
        self.now += self._step_s * (bool(plan.decode) + drafts / 10)
        self.now += self._token_s * sum(chunk.count for chunk in plan.prefill)
        if self._fails:
            return StepResult(failures=tuple(RowFailure(id=row_id, message="no memory") for row_id in self.held))
        rows = (RowTokens(id=row.id, tokens=(7,), drafted=row.drafts) for row in plan.decode)
        return StepResult(rows=tuple(rows))

    def start(self, plan: StepPlan) -> None:
        self._started.append(plan)

    def finish(self) -> StepResult:
        return self.execute(self._started.pop(0))

    @contextmanager
    def filled_drafts(self) -> Iterator[None]:
        self.filled = True
        yield
        self.filled = False

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
    known = [(chunk.tokens, chunk.seconds) for chunk in found.chunks]
    assert known == [(size, pytest.approx(size * token_s)) for size in (64, 256, 1024) if token_s and size <= longest]
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


def drafting(lookahead: int = 1, draft_tokens: int = 8, **fields: Any) -> Capabilities:
    speculation = SpeculationCapabilities(drafters=("any",), draft_tokens=draft_tokens)
    return capabilities(CAN, lookahead=lookahead, speculation=speculation, **fields)


def about(seconds: float) -> Any:
    return pytest.approx(seconds)


@pytest.mark.parametrize(("lookahead", "draft_tokens", "sizes"), [(1, 8, (0, 1, 3, 7, 8)), (0, 3, (0, 1, 3))])
def test_steps_with_drafts_are_timed_for_few_sequences_and_for_more(
    tiny: Tiny, lookahead: int, draft_tokens: int, sizes: tuple[int, ...]
) -> None:
    runner = Clocked(step_s=1e-3, can=drafting(lookahead, draft_tokens))
    found = measure(runner, replace(tiny("llama"), max_running=5), runner.clock)
    assert found.plain == tuple(StepCost(rows, rows, about(1e-3)) for rows in (1, 4, 5))
    assert found.verifying == tuple(
        StepCost(rows, rows * (1 + drafts), about(1e-3 * (1 + rows * drafts / 10)))
        for rows in (1, 4, 5)
        for drafts in sizes
    )
    assert not runner.held


def test_nothing_is_timed_with_drafts_where_none_can_be_verified(tiny: Tiny) -> None:
    runner = Clocked(step_s=1e-3)
    assert measure(runner, tiny("llama"), runner.clock).plain == ()
    assert not any(row.drafts for plan in runner.plans for row in plan.decode)


@pytest.mark.parametrize(("step_s", "most_s"), [(0.03, 5.0), (0.3, 4.0), (3.0, 40.0)])
def test_slow_steps_are_timed_once_and_no_larger_ones_after_them(tiny: Tiny, step_s: float, most_s: float) -> None:
    runner = Clocked(step_s=step_s, can=drafting())
    model = replace(tiny("llama"), max_running=64)
    without = Clocked(step_s=step_s)
    measure(without, model, without.clock)
    found = measure(runner, model, runner.clock)
    assert runner.now - without.now < most_s
    assert (found.plain[0].seconds, found.verifying[0].seconds) == pytest.approx((step_s, step_s))
    assert found.verifying[1] == StepCost(1, 2, about(1.1 * step_s))
    assert len(found.plain) < 4


def test_rows_that_fail_with_drafts_leave_those_costs_out(tiny: Tiny) -> None:
    runner = Clocked(fails=True, can=drafting())
    assert measure(runner, tiny("llama"), runner.clock) == StepCosts()
    assert not runner.held


def test_only_rows_whose_tokens_fit_the_blocks_verify_drafts(tiny: Tiny) -> None:
    runner = Clocked(step_s=1e-3, can=drafting(kv_block=32, kv_blocks=7))
    found = measure(runner, replace(tiny("llama"), max_running=16), runner.clock)
    assert [cost.rows for cost in found.plain] == [1, 2]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_warmed_up_runner_tells_what_drafts_take_and_holds_nothing(tiny: Tiny, name: str) -> None:
    drafter = ScriptedDrafter({})
    runner = ModelRunner(tiny(name, max_running=2), drafter=drafter)
    runner.warm_up()
    can = runner.capabilities().steps.speculation
    assert (can.drafters, can.reason, can.draft_tokens) == (("scripted",), "", 8)
    assert [cost.rows for cost in can.plain] == [1, 2]
    assert {(cost.rows, cost.tokens) for cost in can.verifying} >= {(1, 1), (1, 2), (1, 4), (1, 8)}
    assert runner.statistics().kv_bytes == 0
    assert drafter.proposed == 0


class InTwoWays(Clocked):
    """Its steps take other times with CUDA graphs; those at some places fail."""

    def __init__(self, graphs_s: float, fails: Sequence[int] = (), unit_s: float = 1e-3) -> None:
        super().__init__(step_s=unit_s, can=drafting())
        self.verifies_in_graphs = False
        self._ways_s, self._at = (unit_s, graphs_s * unit_s), fails
        self.turns: list[tuple[bool, int]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        verifies = any(row.drafts for row in plan.decode)
        if verifies:
            self.turns.append((self.verifies_in_graphs, len(plan.decode)))
            self._step_s = self._ways_s[self.verifies_in_graphs]
        self._fails = verifies and len(self.turns) in self._at
        return super().execute(plan)


@pytest.mark.parametrize(
    ("graphs_s", "fails", "told"),
    [
        (0.75, (), "CUDA graphs: with graphs a step takes 0.75 of the time without"),
        (0.97, (), "single launches: with graphs a step takes 0.97 of the time without"),
        (2.0, (), "single launches: with graphs a step takes 2.00 of the time without"),
        (0.5, (1, 30), "CUDA graphs: with graphs a step takes 0.50 of the time without"),
        (0.5, range(99), "single launches: steps with CUDA graphs could not be timed"),
    ],
)
def test_graphs_are_for_steps_that_verify_where_these_are_shorter(
    graphs_s: float, fails: Sequence[int], told: str
) -> None:
    runner = InTwoWays(graphs_s, fails)
    assert choose_launches(runner, 64, 8, runner.clock) == told
    assert runner.verifies_in_graphs == told.startswith("CUDA")
    assert not runner.held
    if not fails:
        assert {rows for _, rows in runner.turns} == {1, 4}
        assert sum(graphs for graphs, _ in runner.turns) == len(runner.turns) / 2


def test_slow_steps_are_tried_both_ways_once() -> None:
    runner = InTwoWays(0.5, unit_s=3.0)
    assert choose_launches(runner, 64, 8, runner.clock).startswith("CUDA graphs")
    assert runner.turns == [(False, 1), (True, 1)]
    assert runner.now < 20


def test_a_step_without_drafts_tells_nothing_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the drafter, or the memory, has no room for any."""
    runner = InTwoWays(0.5)
    monkeypatch.setattr(draft_costs._Decoding, "verifying_s", lambda *_: None)
    assert choose_launches(runner, 1, 8, runner.clock).endswith("could not be timed")
    assert not runner.verifies_in_graphs


def test_a_runner_without_drafts_says_why(tiny: Tiny) -> None:
    for runner, reason in (
        (ModelRunner(tiny("llama")), "no drafter was asked for"),
        (ModelRunner(tiny("llama", padded=True), drafter=ScriptedDrafter({})), "mlx-lm's caches"),
        (ModelRunner(tiny("deepseek_v41"), drafter=ScriptedDrafter({})), "one by one"),
        (ModelRunner(configured(tiny("llama"), device="cuda"), drafter=ScriptedDrafter({})), "is planned anew"),
    ):
        can = runner.capabilities().steps.speculation
        assert reason in can.reason
        assert (can.drafters, can.draft_tokens, can.plain) == ((), 0, ())


def test_a_warmed_up_runner_tells_what_steps_take(runner: ModelRunner) -> None:
    assert (runner.capabilities().steps.decode_step_s, runner.capabilities().steps.prompt_token_s) == (0.0, 0.0)
    runner.warm_up()
    assert runner.capabilities().steps.decode_step_s > 0
    assert runner.capabilities().steps.prompt_token_s > 0
