"""Sequences that are pooled: they generate nothing, and end with a vector of their whole prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.drive import Bench, vector_of
from treadle.core.messages import Finish, FinishReason, Pooling
from treadle.core.plan import RowVector, StepResult

LONG = tuple(range(200))


@pytest.mark.parametrize("length", [1, 2, 30])
@pytest.mark.parametrize("pooling", Pooling)
def test_it_ends_with_its_vector_and_decodes_nothing(pooling: Pooling, length: int) -> None:
    bench = Bench(prefill_tokens=16)
    request = bench.submit("a", prompt=length, max_tokens=0, pooling=pooling)
    counts = []
    while bench.scheduler.has_work:
        bench.step()
        counts += [chunk.count for chunk in bench.plan.prefill]
        assert bench.plan.decode == ()
    bench.assert_undisturbed(request)
    assert sum(counts) == length == bench.statistics().prompt_tokens
    bench.assert_idle()


def test_it_joins_only_where_the_last_token_has_a_block_too() -> None:
    """A prompt that a decode row ends takes that block as it grows."""
    bench = Bench(block=4, blocks=4)
    bench.submit("runs", prompt=7, max_tokens=5)
    bench.step()
    pooled = bench.submit("pooled", prompt=9, max_tokens=0, pooling=Pooling.LAST)
    bench.run()
    bench.assert_undisturbed(pooled)
    assert bench.runner.least_room >= 0


@pytest.mark.parametrize("pooling", Pooling)
def test_only_the_last_token_s_state_is_there_behind_a_cached_prefix(pooling: Pooling) -> None:
    bench = Bench(cache=True, block=1)
    bench.submit("before", prompt=LONG)
    bench.run()
    again = bench.submit("again", prompt=LONG, max_tokens=0, pooling=pooling)
    bench.run()
    bench.assert_undisturbed(again)
    assert bench.heard["again"].cached == [199 if pooling is Pooling.LAST else 0]


@pytest.mark.parametrize("pooling", Pooling)
def test_equal_texts_at_once_wait_for_the_first_where_they_can_reuse_it(pooling: Pooling) -> None:
    bench = Bench(cache=True, block=4, prefill_tokens=64)
    some = [bench.submit(f"{i}", prompt=LONG, max_tokens=0, pooling=pooling) for i in range(3)]
    bench.run()
    for one in some:
        bench.assert_undisturbed(one)
    assert bench.runner.computed == (200 + 2 * 4 if pooling is Pooling.LAST else 600)


def test_one_that_is_preempted_is_computed_again() -> None:
    bench = Bench(max_running=3, block=4, blocks=12, prefill_tokens=8)
    grows = [bench.submit(f"{i}", prompt=4, max_tokens=24) for i in range(2)]
    pooled = bench.submit("pooled", prompt=30, max_tokens=0, pooling=Pooling.MEAN)
    bench.run()
    for one in (*grows, pooled):
        bench.assert_undisturbed(one)
    assert bench.statistics().preempted


@pytest.mark.parametrize("late", [False, True])
def test_one_in_a_step_that_raised_is_computed_again(late: bool) -> None:
    bench = Bench(prefill_tokens=16, lookahead=1)
    pooled = bench.submit("pooled", prompt=40, max_tokens=0, pooling=Pooling.MEAN)
    other = bench.submit("other")
    bench.step()
    setattr(bench.runner, "raises_late" if late else "raises", lambda plan: bench.raised == 0)
    bench.run()
    bench.assert_undisturbed(pooled)
    bench.assert_undisturbed(other)
    assert bench.raised == 1


def test_one_that_is_cancelled_ends_at_once() -> None:
    bench = Bench(prefill_tokens=16, lookahead=1)
    bench.submit("pooled", prompt=40, max_tokens=0, pooling=Pooling.LAST)
    for _ in range(3):
        bench.step()
    bench.cancel("pooled")
    bench.run()
    assert bench.heard["pooled"].finish == Finish(reason=FinishReason.CANCELLED, code="client")
    bench.assert_idle()


def test_one_that_is_to_generate_is_refused() -> None:
    bench = Bench()
    bench.submit("pooled", max_tokens=1, pooling=Pooling.LAST)
    bench.step()
    finish = bench.heard["pooled"].finish
    assert finish is not None
    assert (finish.code, finish.message) == (
        "invalid_request",
        "a pooled sequence generates nothing: max_tokens must be 0",
    )


def test_a_runner_that_forgets_a_vector_is_found_out() -> None:
    bench = Bench()
    bench.submit("pooled", max_tokens=0, pooling=Pooling.LAST)
    plan = bench.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="gains its vector with its last chunk"):
        bench.scheduler.apply(plan, StepResult())


def test_the_vector_of_one_that_has_ended_is_dropped() -> None:
    bench = Bench(lookahead=1)
    request = bench.submit("pooled", max_tokens=0, pooling=Pooling.LAST)
    plan = bench.scheduler.plan(0.0)
    bench.cancel("pooled")
    outputs: Any = bench.scheduler.apply(plan, StepResult(vectors=(RowVector("pooled", vector_of(request)),)))
    assert [output.finish.reason for output in outputs] == [FinishReason.CANCELLED]


def test_prompts_that_are_pooled_are_paid_from_the_credit_beside_others_that_decode() -> None:
    """A list of texts comes to as many tokens as it likes: were each free that a step can end, streams would crawl."""

    def rate(pooling: Pooling | None) -> float:
        bench = Bench(max_running=16, prefill_tokens=512)
        bench.runner.cost = lambda prefill, decode: (0.0005 * prefill, 0.01 if decode else 0.0)
        for i in range(8):
            bench.submit(f"stream {i}", prompt=20, max_tokens=2000)
        for _ in range(80):
            bench.step()
        texts = 0
        began, tokens = bench.now, len(bench.heard["stream 0"].tokens)
        while bench.now < began + 4.0:
            while sum(not heard.finish for heard in bench.heard.values()) < 16:
                bench.submit(f"text {texts}", prompt=20, max_tokens=0 if pooling else 1, pooling=pooling)
                texts += 1
            bench.step()
        return (len(bench.heard["stream 0"].tokens) - tokens) / (bench.now - began)

    assert (rate(Pooling.LAST) > 60, rate(None) < 40) == (True, True), "of 100 tokens a second that it has alone"
