"""Plans that are made while others are in flight: what is known, what is dropped, and to whom a result goes."""

from __future__ import annotations

import pytest

from tests.core.drive import Bench, expected
from treadle.core.messages import CancelReason, Finish, FinishReason, Submit
from treadle.core.plan import RowTokens, StepResult

CANCELLED = Finish(reason=FinishReason.CANCELLED, code="client")


def decoding(bench: Bench) -> dict[str, int]:
    return {row.id: row.position for row in bench.plan.decode}


def test_positions_go_on_while_tokens_are_in_flight() -> None:
    bench = Bench(lookahead=1)
    request = bench.submit("a", prompt=(1, 2, 3), max_tokens=4)
    seen = []
    while bench.scheduler.has_work:
        bench.step()
        seen.append(decoding(bench).get("a"))
    assert seen[:4] == [0, 1, 2, 3]
    assert set(seen[4:]) == {None}
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


# Several tokens a step


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_steps_gain_several_tokens_while_others_are_in_flight(lookahead: int, accepted: int) -> None:
    bench = Bench(lookahead=lookahead, drafts=3)
    bench.runner.accepts = lambda tokens: accepted
    requests = [bench.submit(name, max_tokens=40) for name in "abc"]
    steps = bench.run()
    for request in requests:
        bench.assert_undisturbed(request)
    assert steps <= 40 // (1 + accepted) + 6
    bench.assert_idle()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_books_are_settled_to_what_was_accepted(lookahead: int) -> None:
    """Planned as if all drafts were accepted; settled, only what was is computed, and may be reused."""
    bench = Bench(lookahead=lookahead, drafts=3)
    bench.runner.accepts = lambda tokens: 1
    bench.submit("a", prompt=4, max_tokens=40)
    bench.until(lambda: len(bench.heard["a"].tokens) >= 6)
    seq = bench.scheduler._sequences["a"]
    assert seq.tokens_in_flight == 4 * lookahead
    assert seq.num_computed_tokens == seq.num_tokens - 1 + seq.tokens_in_flight
    assert seq.committed_tokens == seq.num_tokens - 1 == bench.runner.rows["a"].settled


@pytest.mark.parametrize("at", range(7))
def test_an_end_among_several_tokens_drops_the_rest(at: int) -> None:
    """By a stop token; and what the step in flight computes behind it."""
    plain, _ = expected(Submit(id="a", prompt=(1, 2, 3), max_tokens=20))
    bench = Bench(lookahead=1, drafts=3)
    bench.runner.accepts = lambda tokens: 3
    request = bench.submit("a", prompt=(1, 2, 3), max_tokens=20, stop_token_ids=(plain[at],))
    bench.run()
    bench.assert_undisturbed(request)
    assert len(bench.heard["a"].tokens) == at + 1
    bench.assert_idle()


@pytest.mark.parametrize("most", range(1, 9))
def test_no_more_drafts_are_planned_than_tokens_are_wanted(most: int) -> None:
    bench = Bench(lookahead=1, drafts=3)
    bench.runner.accepts = lambda tokens: 3
    request = bench.submit("a", max_tokens=most)
    bench.step()
    assert bench.plan.decode[0].drafts == min(3, most - 1)
    bench.run()
    bench.assert_undisturbed(request)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_nobody_is_preempted_for_drafts(lookahead: int) -> None:
    """They get what all others leave, and give it back when they are rejected."""
    bench = Bench(block=1, blocks=2 * 24, lookahead=lookahead, drafts=5)
    bench.runner.accepts = lambda tokens: 0
    requests = [bench.submit(name, prompt=4, max_tokens=20) for name in "ab"]
    bench.run()
    for request in requests:
        bench.assert_undisturbed(request)
    assert bench.statistics().preempted == 0


def test_a_cancel_drops_tokens_and_drafts_in_flight() -> None:
    bench = Bench(lookahead=1, drafts=3, block=1, blocks=60)
    bench.submit("a", max_tokens=30)
    other = bench.submit("b", max_tokens=20)
    for _ in range(3):
        bench.step()
    bench.cancel("a")
    bench.run()
    bench.assert_undisturbed(other)
    assert bench.heard["a"].finish == CANCELLED
    bench.assert_idle()


# What a runner may not do


def test_a_row_that_neither_gains_nor_fails_is_a_bug() -> None:
    bench = Bench()
    bench.submit("a")
    plan = bench.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="gains or fails"):
        bench.scheduler.apply(plan, StepResult())


@pytest.mark.parametrize(("drafts", "gained"), [(0, (1, 2)), (1, (1, 2, 3)), (1, ())])
def test_more_tokens_than_were_planned_or_none_is_a_bug(drafts: int, gained: tuple[int, ...]) -> None:
    bench = Bench(lookahead=1, drafts=drafts)
    bench.submit("a", max_tokens=9)
    first = bench.scheduler.plan(0.0)
    bench.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="for each accepted draft"):
        bench.scheduler.apply(first, StepResult(rows=(RowTokens("a", gained),)))


def test_results_come_in_the_order_of_their_plans() -> None:
    bench = Bench(lookahead=1)
    bench.submit("a", max_tokens=9)
    bench.scheduler.plan(0.0)
    second = bench.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="in their order"):
        bench.scheduler.apply(second, StepResult())
