"""Plans that are made while others are in flight: what is known, what is dropped, and to whom a result goes."""

from __future__ import annotations

import pytest

from tests.core.drive import Bench, expected
from treadle.core.messages import CancelReason, Finish, FinishReason, Submit
from treadle.core.plan import RowTokens, StepResult

CANCELLED = Finish(reason=FinishReason.CANCELLED, code="client")


def decoding(bench: Bench) -> dict[str, tuple[int | None, int]]:
    return {row.id: (row.token, row.position) for row in bench.plan.decode}


def test_the_token_of_a_step_in_flight_is_not_known_and_the_position_is() -> None:
    bench = Bench(lookahead=1)
    request = bench.submit("a", prompt=(1, 2, 3), max_tokens=4)
    seen = []
    while bench.scheduler.has_work:
        bench.step()
        seen.append(decoding(bench).get("a"))
    assert seen[:4] == [(3, 0), (None, 1), (None, 2), (None, 3)]
    assert not any(seen[4:])
    bench.assert_undisturbed(request)
    bench.assert_idle()


def test_with_two_steps_ahead_a_row_is_planned_twice_beyond_what_is_known() -> None:
    bench = Bench(lookahead=2)
    request = bench.submit("a", max_tokens=6)
    bench.step()
    bench.step()
    assert bench.heard["a"].tokens == []
    assert bench.scheduler.in_flight == 2
    bench.run()
    bench.assert_undisturbed(request)


def test_a_row_that_missed_a_step_waits_until_its_token_is_known() -> None:
    """Of a token that is not known the runner has the last one alone."""
    bench = Bench(lookahead=2, prefill_tokens=16)
    a = bench.submit("a", max_tokens=6)
    bench.step()
    bench.scheduler._sequences["a"].last_decode_step = -1
    b = bench.submit("b", prompt=60)
    bench.step()
    assert decoding(bench) == {}
    bench.run()
    bench.assert_undisturbed(a)
    bench.assert_undisturbed(b)


def test_nothing_is_planned_beyond_the_last_token() -> None:
    bench = Bench(lookahead=1)
    bench.submit("a", max_tokens=1)
    bench.step()
    bench.step()
    assert bench.plan.idle
    assert bench.heard["a"].finish == Finish(reason=FinishReason.LENGTH)


def test_a_prompt_goes_on_behind_chunks_in_flight() -> None:
    bench = Bench(lookahead=1, prefill_tokens=32)
    request = bench.submit("a", prompt=100, max_tokens=3)
    starts = []
    while bench.scheduler.has_work:
        bench.step()
        starts += [chunk.start for chunk in bench.plan.prefill]
    assert starts == [0, 32, 64, 96]
    assert bench.heard["a"].prompt_done == [32, 64, 96, 100]
    bench.assert_undisturbed(request)


def test_a_stop_costs_one_row_step_and_its_result_is_dropped() -> None:
    bench = Bench(lookahead=1)
    tokens, _ = expected(Submit(id="a", prompt=(1, 2, 3), max_tokens=20))
    request = bench.submit("a", prompt=(1, 2, 3), max_tokens=20, stop_token_ids=(tokens[4],))
    planned = 0
    while bench.scheduler.has_work:
        bench.step()
        planned += len(bench.plan.decode)
    bench.assert_undisturbed(request)
    assert planned == len(bench.heard["a"].tokens) + 1
    assert bench.statistics().completion_tokens == 5
    bench.assert_idle()


@pytest.mark.parametrize("steps", range(5))
def test_a_cancel_is_applied_before_the_next_plan_whatever_is_in_flight(steps: int) -> None:
    """B3"""
    bench = Bench(max_running=1, lookahead=1, prefill_tokens=16)
    bench.submit("a", prompt=40, max_tokens=50)
    other = bench.submit("b")
    for _ in range(steps):
        bench.step()
    bench.cancel("a")
    bench.step()
    assert bench.heard["a"].finish == CANCELLED
    assert "a" not in decoding(bench)
    assert [admit.request.id for admit in bench.plan.admit] == ["b"]
    bench.run()
    bench.assert_undisturbed(other)
    bench.assert_idle()


def test_an_id_that_comes_again_never_gets_the_old_ones_result() -> None:
    bench = Bench(lookahead=1)
    bench.submit("a", prompt=(1, 2, 3), max_tokens=50)
    bench.step()
    bench.step()
    bench.cancel("a")
    bench.hear(bench.scheduler.flush())
    del bench.heard["a"]
    request = bench.submit("a", prompt=(7, 8), max_tokens=4)
    assert bench.scheduler.in_flight == 1
    bench.run()
    bench.assert_undisturbed(request)
    bench.assert_idle()


def test_a_stop_string_found_in_front_drops_what_is_in_flight() -> None:
    bench = Bench(lookahead=1)
    bench.submit("a", max_tokens=50)
    for _ in range(3):
        bench.step()
    told = list(bench.heard["a"].tokens)
    bench.cancel("a", CancelReason.STOP)
    bench.run()
    assert bench.heard["a"].finish == Finish(reason=FinishReason.STOP)
    assert bench.heard["a"].tokens == told


def test_a_failed_row_is_dropped_from_the_step_behind() -> None:
    bench = Bench(lookahead=1)
    bench.submit("a", max_tokens=50)
    b = bench.submit("b")
    bench.step()
    bench.runner.failures["a"] = "its mask is empty"
    bench.run()
    assert bench.heard["a"].finish == Finish(
        reason=FinishReason.ERROR, code="engine_step_failed", message="its mask is empty"
    )
    bench.assert_undisturbed(b)
    bench.assert_idle()


def test_the_end_of_all_does_not_wait_for_what_is_in_flight() -> None:
    """C3"""
    bench = Bench(lookahead=1)
    bench.submit("a", max_tokens=50)
    bench.step()
    assert bench.scheduler.in_flight == 1
    bench.hear(bench.scheduler.end_all(CANCELLED))
    assert bench.heard["a"].finish == CANCELLED
    assert bench.scheduler.in_flight == 0
    assert bench.scheduler.take_released_ids() == ("a",)
    assert not bench.scheduler.has_work


def test_a_start_that_raises_costs_nothing_that_was_in_flight() -> None:
    """B7"""
    bench = Bench(lookahead=1)
    requests = [bench.submit(name, max_tokens=8) for name in "ab"]
    bench.step()
    bench.runner.raises = lambda plan: bench.raised == 0
    bench.step()
    assert [len(bench.heard[name].tokens) for name in "ab"] == [1, 1], "the step before is as good as it was"
    bench.step()
    assert [list(admit.history) for admit in bench.plan.admit] == [bench.heard["a"].tokens]
    bench.run()
    for request in requests:
        bench.assert_undisturbed(request)
    assert bench.statistics().recovered_steps == 1
    bench.assert_idle()


def test_a_finish_that_raises_voids_what_was_started_behind_it() -> None:
    """B7"""
    bench = Bench(lookahead=1)
    a = bench.submit("a", max_tokens=8)
    bench.step()
    bench.step()
    b = bench.submit("b", max_tokens=8)
    bench.runner.raises_late = lambda plan: bench.raised == 0
    bench.step()
    assert bench.scheduler.in_flight == 0
    assert len(bench.heard["a"].tokens) == 1
    bench.step()
    assert set(bench.released) == {"a", "b"}
    bench.run()
    bench.assert_undisturbed(a)
    bench.assert_undisturbed(b)
    assert bench.statistics().recovered_steps == 1
    bench.assert_idle()


def test_a_trial_has_nothing_else_in_flight() -> None:
    """B7"""
    bench = Bench(lookahead=1)
    requests = [bench.submit(name, max_tokens=8) for name in "abc"]
    bench.step()
    bench.runner.raises = lambda plan: bench.raised == 0
    bench.step()
    for name in "abc":
        bench.step()
        assert bench.plan.decode[-1].id == name
        assert bench.scheduler.in_flight == 1
        bench.step()
        assert bench.plan.idle
        assert bench.scheduler.in_flight == 0
    bench.run()
    for request in requests:
        bench.assert_undisturbed(request)


def test_a_row_that_makes_steps_raise_late_fails_alone() -> None:
    """B7"""
    bench = Bench(lookahead=1)
    requests = [bench.submit(name, max_tokens=8) for name in "abc"]
    bench.runner.raises_late = lambda plan: any(row.id == "b" and row.position == 3 for row in plan.decode)
    bench.run()
    finish = bench.heard["b"].finish
    assert finish is not None
    assert finish.code == "engine_step_failed"
    assert len(bench.heard["b"].tokens) == 3
    bench.assert_undisturbed(requests[0])
    bench.assert_undisturbed(requests[2])
    bench.assert_idle()


# What a runner may not do


def test_a_row_that_neither_gains_nor_fails_is_a_bug() -> None:
    bench = Bench()
    bench.submit("a")
    plan = bench.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="gains or fails"):
        bench.scheduler.apply(plan, StepResult())


def test_several_tokens_a_step_and_looking_ahead_do_not_go_together() -> None:
    bench = Bench(lookahead=1)
    bench.submit("a", max_tokens=9)
    first = bench.scheduler.plan(0.0)
    bench.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="several tokens"):
        bench.scheduler.apply(first, StepResult(rows=(RowTokens("a", (1, 2)),)))


def test_results_come_in_the_order_of_their_plans() -> None:
    bench = Bench(lookahead=1)
    bench.submit("a", max_tokens=9)
    bench.scheduler.plan(0.0)
    second = bench.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="in their order"):
        bench.scheduler.apply(second, StepResult())
