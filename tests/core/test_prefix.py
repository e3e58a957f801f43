"""Prompts that are reused, groups that share one, and prompts that are only scored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.drive import Bench
from treadle.core.messages import Finish, FinishReason, Submit
from treadle.core.plan import MAX_SCORED_TOKENS
from treadle.core.scheduler import MIN_SHARED_TOKENS, Scheduler

LONG = tuple(range(200))
LENGTH = Finish(reason=FinishReason.LENGTH)


def prefilled(bench: Bench) -> int:
    return sum(chunk.count for chunk in bench.plan.prefill)


# Reuse


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    """F6"""
    bench = Bench(cache=True)
    bench.submit("a", prompt=LONG)
    bench.run()
    again = bench.submit("b", prompt=(*LONG[:100], 7, 7, 7))
    bench.step()
    assert bench.plan.admit[0].cached_tokens == 100
    assert [(chunk.start, chunk.count) for chunk in bench.plan.prefill] == [(100, 2)]
    bench.run()
    bench.assert_undisturbed(again)
    assert bench.heard["a"].cached == [0]
    assert bench.heard["b"].cached == [100]
    assert bench.statistics().cached_tokens == 100
    bench.assert_idle()


def test_all_but_the_last_token_may_be_reused() -> None:
    bench = Bench(cache=True, block=1)
    bench.submit("a", prompt=LONG)
    bench.run()
    again = bench.submit("b", prompt=LONG)
    bench.step()
    assert bench.plan.admit[0].cached_tokens == 199
    assert bench.plan.prefill == ()
    bench.run()
    bench.assert_undisturbed(again)


def test_what_was_reused_is_told_once_though_the_row_joins_again() -> None:
    bench = Bench(cache=True)
    request = bench.submit("a", prompt=LONG, max_tokens=9)
    for _ in range(3):
        bench.step()
    bench.runner.raises = lambda plan: bench.raised == 0
    bench.step()
    bench.run()
    bench.assert_undisturbed(request)
    assert bench.heard["a"].cached == [0]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_who_does_not_get_its_cached_tokens_computes_them(lookahead: int) -> None:
    """They are asked for when a plan is made, and taken over when it is started."""
    bench = Bench(cache=True, lookahead=lookahead)
    first = bench.submit("first", prompt=LONG)
    bench.run()
    other = bench.submit("other", max_tokens=20)
    bench.step()
    bench.runner.evicts = {"a"}
    again = bench.submit("a", prompt=LONG, max_tokens=9)
    bench.step()
    assert bench.plan.admit[0].cached_tokens > 0
    bench.run()
    for request in (first, other, again):
        bench.assert_undisturbed(request)
    assert not bench.runner.evicts
    assert bench.runner.computed >= 2 * (len(LONG) - 1)
    bench.assert_idle()


def test_who_has_ended_meanwhile_is_not_computed_again() -> None:
    bench = Bench(cache=True, lookahead=1)
    bench.submit("first", prompt=LONG)
    bench.run()
    bench.runner.evicts = {"a"}
    bench.submit("a", prompt=LONG)
    bench.step()
    bench.cancel("a")
    bench.run()
    assert bench.heard["a"].tokens == []
    bench.assert_idle()


def test_a_plan_can_be_made_again_as_it_changes_nothing_in_the_runner() -> None:
    bench = Bench(cache=True, share=True, block=4, blocks=200)
    bench.submit("first", prompt=LONG)
    bench.run()
    free, plans = bench.runner.free_blocks(), []
    for _ in range(2):
        scheduler = Scheduler(bench.scheduler.limits, bench.runner.match_prefix)
        scheduler.submit(Submit(id="a", prompt=LONG, max_tokens=3), 0.0)
        plans.append(scheduler.plan(0.0, bench.runner.free_blocks()))
    assert plans[0] == plans[1]
    assert plans[0].admit[0].cached_tokens == 196
    assert (bench.runner.free_blocks(), bench.runner.rows) == (free, {})


@pytest.mark.parametrize("said", [-1, 200, 1000])
def test_a_runner_that_reuses_what_is_not_there_is_a_bug(said: int) -> None:
    bench = Bench(match=lambda admit: said)
    bench.submit("a", prompt=LONG)
    with pytest.raises(AssertionError, match="all but the last may be reused"):
        bench.step()


def test_other_salts_are_not_told_of_each_other() -> None:
    bench = Bench(cache=True)
    bench.submit("a", prompt=LONG, salt="one")
    bench.run()
    bench.submit("b", prompt=LONG, salt="two")
    bench.run()
    assert bench.heard["b"].cached == [0]


def test_a_row_joins_once_there_is_room_for_all_that_it_may_reuse() -> None:
    """The rows that run grow first: what they take is not given to a prefix."""
    bench = Bench(cache=True, block=1, blocks=80, lookahead=1)
    bench.submit("old", prompt=LONG[:40], max_tokens=1)
    bench.run()
    rows = [bench.submit(f"{i}", prompt=LONG[:40], max_tokens=30) for i in range(3)]
    bench.run()
    for request in rows:
        bench.assert_undisturbed(request)
    assert bench.runner.least_room >= 0


# Groups


def test_the_first_of_a_group_computes_the_prompt_and_the_others_join_it() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    rows = [bench.submit(f"g.{i}", prompt=LONG, group="g") for i in range(4)]
    computed = 0
    while not bench.heard["g.0"].tokens:
        bench.step()
        computed += prefilled(bench)
        assert [chunk.id for chunk in bench.plan.prefill] == ["g.0"]
    assert all(bench.heard[row.id].admitted == 1 for row in rows), "they count as admitted"
    bench.step()
    assert [admit.cached_tokens for admit in bench.plan.admit] == [196, 196, 196]
    assert computed + prefilled(bench) == 199 + 3 * 3
    bench.run()
    for request in rows:
        bench.assert_undisturbed(request)
    assert [bench.heard[row.id].cached for row in rows] == [[0], [196], [196], [196]]
    bench.assert_idle()


def test_where_the_first_one_goes_the_next_one_leads() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    rows = [bench.submit(f"g.{i}", prompt=LONG, group="g") for i in range(3)]
    bench.step()
    bench.cancel("g.0")
    bench.step()
    assert [admit.request.id for admit in bench.plan.admit] == ["g.1"]
    bench.run()
    for request in rows[1:]:
        bench.assert_undisturbed(request)
    bench.assert_idle()


@pytest.mark.parametrize("late", [False, True])
def test_those_who_wait_for_a_prompt_stay_out_of_a_trial(late: bool) -> None:
    """B7: they could be the ones to blame."""
    bench = Bench(cache=True, prefill_tokens=64, lookahead=1)
    rows = [bench.submit(f"g.{i}", prompt=LONG, group="g") for i in range(3)]
    bench.step()
    if late:
        bench.runner.raises_late = lambda plan: bench.raised == 0
    else:
        bench.runner.raises = lambda plan: bench.raised == 0
    bench.run()
    assert bench.raised == 1
    for request in rows:
        bench.assert_undisturbed(request)
    bench.assert_idle()


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        ((LONG, LONG[::-1]), {"group": "g"}),
        ((LONG[:MIN_SHARED_TOKENS], LONG[:MIN_SHARED_TOKENS]), {"group": "g"}),
        ((LONG, LONG), {"group": "g", "prompt_logprobs": 0}),
    ],
    ids=["other prompts", "short ones", "scored ones"],
)
def test_nobody_waits_for_what_is_no_use_to_it(prompts: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    bench = Bench(cache=True)
    for i, prompt in enumerate(prompts):
        bench.submit(f"{i}", prompt=prompt, **options)
    bench.step()
    assert len(bench.plan.admit) == 2


def test_nobody_waits_where_nothing_is_cached() -> None:
    bench = Bench()
    for i in range(2):
        bench.submit(f"{i}", prompt=LONG, group="g")
    bench.step()
    assert len(bench.plan.admit) == 2


def test_nobody_waits_for_a_prompt_that_is_cached_already() -> None:
    bench = Bench(cache=True, prefill_tokens=1)
    bench.submit("a", prompt=LONG)
    bench.run()
    for i in range(3):
        bench.submit(f"g.{i}", prompt=LONG, group="g")
    bench.step()
    assert [admit.cached_tokens for admit in bench.plan.admit] == [196, 196, 196]


# Scores


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("prompt", [1, 2, 90])
def test_a_request_for_no_tokens_ends_when_its_prompt_is_computed(prompt: int, lookahead: int) -> None:
    bench = Bench(prefill_tokens=32, lookahead=lookahead)
    request = bench.submit("a", prompt=prompt, max_tokens=0, prompt_logprobs=0)
    planned = 0
    while bench.scheduler.has_work:
        bench.step()
        planned += len(bench.plan.decode)
    assert planned == 0
    assert bench.heard["a"].finish == LENGTH
    assert bench.heard["a"].scores == [-float(token) for token in request.prompt[1:]]
    assert bench.statistics().finished == 1
    bench.assert_idle()


def test_scores_come_once_though_the_prompt_is_computed_again() -> None:
    bench = Bench(prefill_tokens=32)
    request = bench.submit("a", prompt=90, prompt_logprobs=0)
    bench.step()
    bench.step()
    bench.runner.raises_late = lambda plan: bench.raised == 0
    bench.step()
    bench.run()
    bench.assert_undisturbed(request)
    assert bench.heard["a"].scores == [-float(token) for token in request.prompt[1:]]


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    bench = Bench(cache=True)
    bench.submit("a", prompt=LONG)
    bench.run()
    request = bench.submit("b", prompt=LONG, prompt_logprobs=0)
    bench.run()
    bench.assert_undisturbed(request)
    assert bench.heard["b"].cached == [0]
    assert len(bench.heard["b"].scores) == 199


def test_scores_of_a_row_that_has_gone_are_dropped() -> None:
    bench = Bench(prefill_tokens=32, lookahead=1)
    bench.submit("a", prompt=90, prompt_logprobs=0)
    bench.step()
    bench.cancel("a")
    bench.run()
    assert bench.heard["a"].scores == []
    bench.assert_idle()


def test_a_prompt_of_one_cached_token_less_ends_without_work() -> None:
    bench = Bench(cache=True, block=1)
    bench.submit("a", prompt=LONG, max_tokens=0)
    bench.run()
    bench.submit("b", prompt=LONG, max_tokens=0)
    bench.step()
    assert (bench.plan.prefill, bench.plan.decode) == ((), ())
    assert bench.heard["b"].finish == LENGTH
    bench.run()
    bench.assert_idle()


def test_a_step_scores_no_more_tokens_than_it_has_memory_for() -> None:
    """Each takes a row of the vocabulary's length; who is not scored gets the whole of what a step may compute."""
    bench = Bench(prefill_tokens=4096)
    for tokens in (64, 4096):  # a fast machine
        charge = bench.scheduler._prefill_budget.charge(tokens, decoding=0)
        bench.scheduler._prefill_budget.observe(charge, prefill_s=1e-6 * tokens, decode_s=0.0)
    requests = [bench.submit(name, prompt=1500, prompt_logprobs=0) for name in "ab"]
    requests.append(bench.submit("c", prompt=1500))
    most = 0
    while bench.scheduler.has_work:
        bench.step()
        chunks = {chunk.id: chunk.count for chunk in bench.plan.prefill}
        assert chunks.get("a", 0) + chunks.get("b", 0) <= MAX_SCORED_TOKENS
        most = max(most, sum(chunks.values()))
    assert most > MAX_SCORED_TOKENS
    for request in requests:
        bench.assert_undisturbed(request)
    bench.assert_idle()
