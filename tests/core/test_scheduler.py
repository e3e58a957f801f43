"""Who runs when, and that each sequence is told its end exactly once."""

from __future__ import annotations

import pytest

from tests.core.drive import Bench, expected
from treadle.core.early_cancels import EARLY_CANCEL_S, REMEMBERED_IDS
from treadle.core.messages import Cancel, CancelReason, Finish, FinishReason, Submit, TokenLogprob
from treadle.core.plan import RowFailure, RowTokens, StepPlan, StepResult
from treadle.core.scheduler import Scheduler, SchedulerLimits
from treadle.core.statistics import RunnerStatistics

CANCELLED = Finish(reason=FinishReason.CANCELLED, code="client")
SHUTDOWN = Finish(reason=FinishReason.ERROR, code="server_stopping", message="the server is stopping")


def ids(plan: StepPlan) -> tuple[list[str], list[str], list[str]]:
    return [a.request.id for a in plan.admit], [c.id for c in plan.prefill], [d.id for d in plan.decode]


# Plan and apply


def test_a_sequence_runs_to_its_length() -> None:
    bench = Bench()
    request = bench.submit("a", prompt=10, max_tokens=5)
    bench.run()
    bench.assert_undisturbed(request)
    bench.assert_idle()


def test_a_sequence_ends_at_its_stop_token() -> None:
    bench = Bench()
    tokens, _ = expected(Submit(id="a", prompt=(1, 2, 3), max_tokens=20))
    request = bench.submit("a", prompt=(1, 2, 3), max_tokens=20, stop_token_ids=(tokens[6],))
    bench.run()
    bench.assert_undisturbed(request)
    assert bench.heard["a"].finish == Finish(reason=FinishReason.STOP, stop_token_id=tokens[6])


@pytest.mark.parametrize(("max_tokens", "stops", "end"), [(9, (), None), (1, (), None), (9, (7,), 7), (1, (7,), 7)])
def test_a_token_that_completes_a_constraint_ends_its_sequence(
    max_tokens: int, stops: tuple[int, ...], end: int | None
) -> None:
    """Also where `min_tokens` holds stop tokens, and at the limit."""
    bench = Bench()
    bench.submit("a", prompt=(1,), max_tokens=max_tokens, stop_token_ids=stops, min_tokens=5)
    plan = bench.scheduler.plan(bench.now)
    outputs = bench.scheduler.apply(plan, StepResult(rows=(RowTokens("a", (7,), ended=True),)))
    assert [output.finish for output in outputs] == [Finish(reason=FinishReason.STOP, stop_token_id=end)]


def test_a_prompt_that_is_complete_decodes_in_the_same_step() -> None:
    bench = Bench()
    bench.submit("a", prompt=10)
    bench.step()
    assert ids(bench.plan) == (["a"], ["a"], ["a"])


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    bench = Bench()
    request = bench.submit("a", prompt=1)
    bench.step()
    assert ids(bench.plan) == (["a"], [], ["a"])
    bench.run()
    bench.assert_undisturbed(request)


def test_a_newcomer_prefills_in_the_next_step_beside_those_that_decode() -> None:
    """B1"""
    bench = Bench()
    bench.submit("a", max_tokens=50)
    bench.step()
    bench.submit("b")
    bench.step()
    assert ids(bench.plan) == (["b"], ["b"], ["a", "b"])


def test_a_long_prompt_goes_in_by_chunks_and_progress_is_told() -> None:
    bench = Bench(prefill_tokens=32)
    request = bench.submit("a", prompt=100, max_tokens=2)
    bench.run()
    bench.assert_undisturbed(request)
    assert bench.heard["a"].prompt_done == [32, 64, 96, 100]


def test_a_slot_is_used_again_in_the_step_after_its_row_ended() -> None:
    bench = Bench(max_running=1)
    bench.submit("a", max_tokens=2)
    bench.submit("b")
    bench.step()
    assert ids(bench.plan)[2] == ["a"]
    bench.step()
    bench.step()
    assert bench.released == ("a",)
    assert ids(bench.plan)[2] == ["b"]


def test_first_come_first_served_within_a_priority_and_lower_priorities_first() -> None:
    bench = Bench(max_running=1)
    bench.submit("busy")
    bench.step()
    for name, priority in (("c1", 5), ("c2", 5), ("a", -1), ("b", 0)):
        bench.submit(name, priority=priority)
    order = []
    while bench.scheduler.has_work:
        order += [output.id for output in bench.step() if output.admitted]
    assert order == ["a", "b", "c1", "c2"]


def test_several_tokens_a_step_end_at_the_limit_and_the_rest_is_dropped() -> None:
    bench = Bench(drafts=2)
    bench.runner.accepts = lambda tokens: 2
    request = bench.submit("a", max_tokens=7)
    steps = bench.run()
    bench.assert_undisturbed(request)
    assert steps == 4  # three that gain, one that releases
    bench.assert_idle()


def test_logprobs_stay_with_their_tokens() -> None:
    bench = Bench(drafts=2)
    bench.submit("a", max_tokens=9, logprobs=0, stop_token_ids=(2,))
    plan = bench.scheduler.plan(0.0)
    several = tuple(TokenLogprob(logprob=-float(i)) for i in range(3))
    outputs = bench.scheduler.apply(plan, StepResult(rows=(RowTokens("a", (1, 2, 3), several, drafted=2),)))
    assert outputs[0].tokens == (1, 2)
    assert outputs[0].logprobs == several[:2]


def test_the_wait_is_measured_from_arrival_to_admission() -> None:
    bench = Bench(max_running=1)
    bench.submit("a", max_tokens=3)
    bench.submit("b")
    bench.run()
    assert bench.heard["a"].wait_s == 0.0
    assert bench.heard["b"].wait_s == pytest.approx(0.03)
    assert bench.heard["b"].admitted == 1


def test_a_row_failure_ends_that_row_alone() -> None:
    """B5, B7"""
    bench = Bench()
    a, b = bench.submit("a"), bench.submit("b")
    bench.step()
    bench.runner.failures["a"] = "its mask is empty"
    bench.run()
    finish = bench.heard["a"].finish
    assert finish == Finish(reason=FinishReason.ERROR, code="engine_step_failed", message="its mask is empty")
    assert tuple(bench.heard["a"].tokens) == expected(a)[0][:1]
    bench.assert_undisturbed(b)
    bench.assert_idle()


def test_results_for_rows_that_are_gone_change_nothing() -> None:
    bench = Bench()
    bench.submit("a", prompt=40)
    plan = bench.scheduler.plan(0.0)
    bench.cancel("a")
    result = StepResult(rows=(RowTokens("a", (1,)),), failures=(RowFailure("a", "late"),))
    bench.hear(bench.scheduler.apply(plan, result))
    assert bench.heard["a"].finish == CANCELLED
    assert bench.heard["a"].tokens == []
    bench.run()
    bench.assert_idle()


def test_a_plan_without_work_knows_that_it_is_idle() -> None:
    bench = Bench()
    assert bench.scheduler.plan(0.0).idle
    bench.submit("a")
    assert not bench.scheduler.plan(0.0).idle


# Cancel


@pytest.mark.parametrize("steps", range(6))
def test_a_cancel_in_any_phase_ends_once_and_frees_the_slot_at_once(steps: int) -> None:
    """B3, B6"""
    bench = Bench(max_running=1, prefill_tokens=16)
    bench.submit("a", prompt=40, max_tokens=10)
    follow_up = bench.submit("b")
    for _ in range(steps):
        bench.step()
    bench.cancel("a")
    bench.cancel("a")
    bench.step()
    assert bench.heard["a"].finish == CANCELLED
    assert "b" in ids(bench.plan)[0]
    bench.run()
    bench.assert_undisturbed(follow_up)
    bench.assert_idle()


def test_a_cancel_that_races_the_admission_is_not_lost() -> None:
    """B4"""
    bench = Bench()
    bench.submit("a")
    plan = bench.scheduler.plan(0.0)
    assert ids(plan)[0] == ["a"]
    result = bench.runner.execute(plan)
    bench.cancel("a")
    bench.hear(bench.scheduler.apply(plan, result))
    assert bench.heard["a"].finish == CANCELLED
    bench.step()
    assert bench.released == ("a",)
    bench.assert_idle()


def test_a_stop_string_is_a_good_end() -> None:
    bench = Bench()
    bench.submit("a", max_tokens=50)
    bench.step()
    bench.cancel("a", CancelReason.STOP)
    bench.run()
    assert bench.heard["a"].finish == Finish(reason=FinishReason.STOP)
    assert bench.statistics().finished == 1


@pytest.mark.parametrize("reason", [CancelReason.CLIENT, CancelReason.STALLED, CancelReason.SHUTDOWN])
def test_a_cancel_tells_why(reason: CancelReason) -> None:
    bench = Bench()
    bench.submit("a")
    bench.cancel("a", reason)
    bench.step()
    assert bench.heard["a"].finish == Finish(reason=FinishReason.CANCELLED, code=reason.value)


def test_a_cancel_that_comes_first_meets_its_request() -> None:
    """B4"""
    bench = Bench()
    bench.cancel("a")
    bench.now += EARLY_CANCEL_S
    bench.submit("a")
    bench.step()
    assert bench.heard["a"].finish == CANCELLED
    assert bench.heard["a"].admitted == 0
    bench.assert_idle()


def test_a_cancel_that_came_long_before_is_forgotten() -> None:
    bench = Bench()
    bench.cancel("a")
    bench.now += EARLY_CANCEL_S + 1
    request = bench.submit("a")
    bench.run()
    bench.assert_undisturbed(request)


def test_an_early_cancel_counts_for_one_request_only() -> None:
    bench = Bench()
    bench.cancel("a")
    bench.submit("a")
    bench.step()
    bench.heard.clear()
    request = bench.submit("a")
    bench.run()
    bench.assert_undisturbed(request)


def test_a_late_cancel_does_not_meet_the_next_request_of_that_id() -> None:
    bench = Bench()
    bench.submit("a")
    bench.run()
    bench.cancel("a")
    bench.heard.clear()
    request = bench.submit("a")
    bench.run()
    bench.assert_undisturbed(request)


def test_unknown_cancels_do_not_pile_up() -> None:
    bench = Bench()
    for i in range(REMEMBERED_IDS + 100):
        bench.cancel(f"unknown {i}")
    assert len(bench.scheduler._early_cancels._early) == REMEMBERED_IDS
    assert not bench.scheduler.has_work


def test_ended_ids_do_not_pile_up() -> None:
    bench = Bench(max_running=64)
    for i in range(REMEMBERED_IDS + 100):
        bench.submit(f"{i}")
        bench.cancel(f"{i}")
    bench.step()
    assert len(bench.scheduler._early_cancels._ended) == REMEMBERED_IDS


def test_an_id_that_ended_again_is_remembered_from_its_last_end() -> None:
    bench = Bench()

    def ends(name: str) -> None:
        bench.submit(name)
        bench.cancel(name)
        bench.scheduler.flush()

    ends("a")
    for i in range(REMEMBERED_IDS - 50):
        ends(f"{i}")
    ends("a")
    for i in range(100):
        ends(f"late {i}")
    bench.cancel("a")
    request = bench.submit("a")
    bench.run()
    bench.assert_undisturbed(request)


def test_cancelled_waits_do_not_pile_up_behind_long_runs() -> None:
    bench = Bench(max_running=1)
    bench.submit("long", max_tokens=1000)
    bench.submit("patient")
    for i in range(500):
        bench.submit(f"{i}")
        bench.cancel(f"{i}")
        bench.step()
    assert bench.scheduler._queue._entries <= 2


# Ids


def test_a_live_duplicate_is_ignored() -> None:
    bench = Bench()
    request = bench.submit("a", max_tokens=6)
    bench.step()
    bench.scheduler.submit(Submit(id="a", prompt=(9, 9, 9), max_tokens=2), bench.now)
    bench.run()
    bench.assert_undisturbed(request)
    bench.assert_idle()


def test_an_id_that_is_used_again_at_once_is_told_of_apart() -> None:
    """The end of the first and the beginning of the second come as two outputs, in this order."""
    bench = Bench()
    bench.submit("a", max_tokens=50)
    bench.step()
    bench.cancel("a")
    request = Submit(id="a", prompt=(5, 6, 7), max_tokens=3)
    bench.scheduler.submit(request, bench.now)
    assert bench.scheduler.take_released_ids() == ("a",)
    bench.runner.release("a")
    plan = bench.scheduler.plan(bench.now)
    assert ids(plan)[0] == ["a"]
    first, second = bench.scheduler.apply(plan, bench.runner.execute(plan))
    assert (first.finish, first.admitted) == (CANCELLED, False)
    assert (second.finish, second.admitted, second.tokens) == (None, True, expected(request)[0][:1])


def test_released_ids_are_told_once_and_are_not_lost_by_planning() -> None:
    bench = Bench()
    bench.submit("a", max_tokens=50)
    bench.step()
    bench.cancel("a")
    assert bench.scheduler.plan(bench.now).idle
    assert bench.scheduler.take_released_ids() == ("a",)
    assert bench.scheduler.take_released_ids() == ()


# Waiting


def test_a_wait_that_is_over_ends_as_expired() -> None:
    """D2"""
    bench = Bench(max_running=1)
    bench.submit("long", max_tokens=100)
    bench.step()
    bench.submit("a", max_wait_s=0.5)
    bench.step(0.49)
    bench.step()
    assert bench.heard["a"].finish is None
    bench.step()
    assert bench.heard["a"].finish == Finish(reason=FinishReason.EXPIRED, code="text_generation_busy")
    assert bench.scheduler._queue._entries == 0


def test_who_may_not_wait_runs_at_once_or_expires_at_once() -> None:
    bench = Bench(max_running=1)
    bench.submit("a", max_tokens=9, max_wait_s=0.0)
    bench.submit("b", max_wait_s=0.0)
    bench.step()
    assert bench.heard["a"].admitted == 1
    assert bench.heard["b"].finish is not None
    assert bench.heard["b"].finish.reason is FinishReason.EXPIRED


def test_a_wait_that_is_over_when_a_slot_is_free_still_gets_it() -> None:
    bench = Bench(max_running=1)
    request = bench.submit("a", max_wait_s=0.1)
    bench.now += 5
    bench.run()
    bench.assert_undisturbed(request)


def test_once_one_of_a_group_runs_the_others_waits_do_not_end() -> None:
    """D2: a 200 never turns into an error for lack of room."""
    bench = Bench(max_running=1)
    group = [bench.submit(f"g.{i}", group="g", max_wait_s=0.02) for i in range(3)]
    bench.submit("other", max_wait_s=0.02)
    bench.run()
    for request in group:
        bench.assert_undisturbed(request)
    assert bench.heard["other"].finish is not None
    assert bench.heard["other"].finish.reason is FinishReason.EXPIRED
    bench.assert_idle()


def test_one_slot_is_the_same_engine_one_sequence_at_a_time() -> None:
    """D4, F1: serialized mode admits, chunks and cancels like any other."""
    bench = Bench(max_running=1, prefill_tokens=16)
    requests = [bench.submit(f"r{i}", prompt=40, max_tokens=5) for i in range(4)]
    bench.cancel("r1")
    seen: list[str] = []
    while bench.scheduler.has_work:
        bench.step()
        plan = bench.plan
        inside = {*ids(plan)[0], *ids(plan)[1], *ids(plan)[2]}
        assert len(inside) <= 1, "two sequences in one step"
        seen += [name for name in inside if name not in seen]
    assert seen == ["r0", "r2", "r3"]
    for request in (requests[0], *requests[2:]):
        bench.assert_undisturbed(request)
    bench.assert_idle()


@pytest.mark.parametrize("late", [False, True])
def test_the_rest_of_a_group_that_has_begun_goes_first(late: bool) -> None:
    """D2: nothing waits without a bound, so a stream of better priorities does not hold up what may not be refused."""
    bench = Bench(max_running=1)
    group = [bench.submit("g.0", group="g", priority=1)]
    if late:
        bench.step()
    bench.submit("before")
    group.append(bench.submit("g.1", group="g", priority=1))
    bench.cancel("before")
    bench.step()
    for i in range(20):
        bench.submit(f"better{i}", max_tokens=2)
        bench.step()
    for request in group:
        bench.assert_undisturbed(request)
    bench.run()
    bench.assert_idle()


def test_a_group_of_which_none_runs_expires_together() -> None:
    bench = Bench(max_running=1)
    bench.submit("long", max_tokens=100)
    bench.step()
    for i in range(3):
        bench.submit(f"g.{i}", group="g", max_wait_s=0.02)
    for _ in range(4):
        bench.step()
    assert [bench.heard[f"g.{i}"].finish.reason for i in range(3)] == [FinishReason.EXPIRED] * 3  # type: ignore[union-attr]


def test_a_group_that_has_ended_is_forgotten_with_its_start() -> None:
    bench = Bench(max_running=1)
    bench.submit("g.0", group="g")
    bench.run()
    bench.submit("long", max_tokens=100)
    bench.step()
    bench.submit("g.1", group="g", max_wait_s=0.0)
    bench.step()
    assert bench.heard["g.1"].finish is not None


# Room in the cache


def test_running_rows_stay_within_the_cache() -> None:
    bench = Bench(max_running=8, kv_tokens=40)
    requests = [bench.submit(f"{i}", prompt=6, max_tokens=10) for i in range(6)]
    while bench.scheduler.has_work:
        bench.step()
        assert bench.statistics().running <= 2
        assert sum(row.max_num_tokens for row in bench.scheduler._running.values()) <= 40
    for request in requests:
        bench.assert_undisturbed(request)
    bench.assert_idle()


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_one() -> None:
    bench = Bench(max_running=8, kv_tokens=40)
    bench.submit("first", prompt=10, max_tokens=20)
    bench.submit("big", prompt=10, max_tokens=20)
    bench.submit("small", prompt=2, max_tokens=2)
    order = []
    while bench.scheduler.has_work:
        order += [output.id for output in bench.step() if output.admitted]
    assert order == ["first", "big", "small"]


def test_what_can_never_fit_is_told_at_once_and_holds_up_nobody() -> None:
    bench = Bench(kv_tokens=40)
    bench.submit("huge", prompt=30, max_tokens=30)
    request = bench.submit("a")
    bench.run()
    finish = bench.heard["huge"].finish
    assert finish is not None
    assert finish.code == "context_length_exceeded"
    assert "60 tokens" in finish.message
    assert "holds 40" in finish.message
    assert bench.heard["huge"].admitted == 0
    bench.assert_undisturbed(request)


def test_an_empty_prompt_ends_at_once_and_holds_up_nobody() -> None:
    """B7: it has nothing to prefill and nothing to decode, so no step could ever end it."""
    bench = Bench(max_running=1)
    bench.submit("empty", prompt=())
    request = bench.submit("a")
    bench.run(steps=20)
    finish = bench.heard["empty"].finish
    assert finish is not None
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "invalid_request")
    bench.assert_undisturbed(request)
    bench.assert_idle()


# The end of all


def test_the_end_reaches_everyone_once() -> None:
    """C3"""
    bench = Bench(max_running=2, prefill_tokens=16)
    bench.submit("decoding", max_tokens=50)
    bench.step()
    bench.submit("prefilling", prompt=200)
    bench.submit("waiting")
    bench.step()
    bench.cancel("waiting")
    bench.hear(bench.scheduler.end_all(SHUTDOWN))
    assert bench.heard["decoding"].finish == SHUTDOWN
    assert bench.heard["prefilling"].finish == SHUTDOWN
    assert bench.heard["waiting"].finish == CANCELLED
    assert bench.scheduler.live == 0
    assert bench.scheduler.end_all(SHUTDOWN) == ()
    bench.step()
    bench.assert_idle()


# What it says of itself


def test_statistics_count_everything_once() -> None:
    """D3"""
    bench = Bench(max_running=2, kv_tokens=1000, prefill_tokens=16)
    bench.submit("huge", prompt=600, max_tokens=600)
    bench.submit("done", prompt=10, max_tokens=3)
    bench.run()
    bench.submit("cancelled", prompt=100, max_tokens=9)
    bench.submit("running", prompt=4, max_tokens=90)
    bench.step()
    bench.submit("expires", max_wait_s=0.0)
    bench.step()
    bench.submit("waits")
    bench.now += 2.0
    now = bench.statistics()
    assert (now.running, now.prefilling, now.waiting, now.oldest_wait_s) == (2, 1, 1, 2.0)
    bench.cancel("cancelled")
    bench.run()
    now = bench.scheduler.statistics(bench.now, RunnerStatistics(kv_bytes=7), step_s=0.5)
    assert (now.finished, now.cancelled, now.expired, now.failed) == (3, 1, 1, 1)
    assert now.completion_tokens == 3 + 90 + 4
    assert (now.running, now.prefilling, now.waiting, now.oldest_wait_s) == (0, 0, 0, 0.0)
    assert now.runner.kv_bytes == 7
    assert now.step_s == 0.5
    assert now.recovered_steps == 0


def test_prompt_tokens_are_counted_whole() -> None:
    bench = Bench(prefill_tokens=16)
    bench.submit("a", prompt=100)
    bench.submit("b", prompt=1)
    bench.run()
    assert bench.statistics().prompt_tokens == 101


def test_times_of_the_runner_add_up() -> None:
    bench = Bench()
    bench.runner.cost = lambda prefill, decode: (0.25, 0.5)
    bench.submit("a", max_tokens=2)
    bench.run()
    now = bench.statistics()
    assert (now.steps, now.prefill_s, now.decode_s) == (2, 0.5, 1.0)


def test_integrity_notices_books_that_do_not_agree() -> None:
    bench = Bench()
    bench.submit("a", max_tokens=50)
    bench.step()
    bench.scheduler._sequences["a"].tokens_in_flight += 1
    with pytest.raises(AssertionError, match="sequences count their tokens in flight"):
        bench.scheduler.check_integrity()


def test_a_plan_without_work_is_applied_without_harm() -> None:
    """And a scheduler that is told of no runner's memory reuses nothing and counts nothing."""
    scheduler = Scheduler(SchedulerLimits(max_running=1, prefill_tokens=16))
    scheduler.submit(Submit(id="a", prompt=(1, 2), max_tokens=0), 0.0)
    scheduler.cancel(Cancel(id="a"), 0.0)
    (output,) = scheduler.apply(scheduler.plan(0.0), StepResult())
    assert output.finish == CANCELLED
    scheduler.submit(Submit(id="b", prompt=(1, 2), max_tokens=1), 0.0)
    assert scheduler.plan(0.0).admit[0].cached_tokens == 0
