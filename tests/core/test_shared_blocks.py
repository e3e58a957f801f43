"""Blocks that rows hold together are counted once: who comes in on them, and what happens where they come free."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.core.drive import Bench, pop_head
from tests.core.test_inflight_prefix import tail
from treadle.core import block_budget
from treadle.core.shared_blocks import MAX_PEERS

SYSTEM = tuple(range(400))


@pytest.fixture(autouse=True)
def _little_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 4)


def running(bench: Bench) -> int:
    return bench.statistics().running


def with_one_that_runs(**shape: Any) -> Bench:
    """Of 130 blocks one row holds 105, 100 of them for what the others begin with."""
    bench = Bench(cache=True, block=4, blocks=130, max_running=20, **shape)
    bench.submit("first", prompt=(*SYSTEM, *tail("first")), max_tokens=30)
    bench.until(lambda: bool(bench.heard["first"].tokens))
    return bench


def test_who_begins_like_one_that_runs_is_let_in_on_the_rest_alone() -> None:
    bench = with_one_that_runs(share=True)
    rows = [bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}", 8)), max_tokens=4) for i in range(4)]
    bench.step()
    assert running(bench) == 5
    assert [admit.cached_tokens for admit in bench.plan.admit] == [400] * 4
    assert bench.plan.decode[0].id == "first"
    bench.run()
    for request in rows:
        bench.assert_undisturbed(request)
    assert bench.statistics().preempted == 0
    assert bench.runner.least_room >= 0


@pytest.mark.parametrize("why", ["copies", "salt", "scored", "else"])
def test_who_holds_nothing_together_with_others_waits_for_room_for_all(why: str) -> None:
    bench = with_one_that_runs(share=why != "copies")
    prompt = (*SYSTEM, *tail("second", 8)) if why != "else" else (*SYSTEM[::-1], 1)
    options: dict[str, Any] = {"salt": "other"} if why == "salt" else {}
    options |= {"prompt_logprobs": 0} if why == "scored" else {}
    second = bench.submit("second", prompt=prompt, max_tokens=4, **options)
    bench.step()
    assert running(bench) == 1
    bench.run()
    bench.assert_undisturbed(second)


def test_what_the_cache_alone_holds_counts() -> None:
    """It would be taken from what can be given up."""
    bench = Bench(cache=True, block=4, blocks=130, share=True)
    bench.submit("old", prompt=(*SYSTEM, 1), max_tokens=1)
    bench.run()
    bench.submit("other", prompt=160, max_tokens=30)
    bench.until(lambda: bool(bench.heard["other"].tokens))
    again = bench.submit("again", prompt=(*SYSTEM, 2), max_tokens=4)
    bench.step()
    assert running(bench) == 1
    bench.run()
    bench.assert_undisturbed(again)


def test_what_is_not_computed_yet_counts_for_each() -> None:
    bench = Bench(cache=True, block=4, blocks=260, max_running=20, share=True, prefill_tokens=100)
    for i in range(6):
        bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}", 8)), max_tokens=30)
    bench.step()
    assert running(bench) == 2
    bench.until(lambda: running(bench) == 6)
    bench.run()
    assert bench.statistics().preempted == 0


def test_where_the_other_one_goes_another_is_looked_for() -> None:
    bench = with_one_that_runs(share=True)
    bench.submit("second", prompt=(*SYSTEM, *tail("second", 8)), max_tokens=30)
    bench.step()
    bench.submit("third", prompt=(*SYSTEM[:300], *tail("third", 100)), max_tokens=4)
    bench.step()
    third = bench.scheduler._sequences["third"]
    assert (running(bench), third.prefix_peer is bench.scheduler._sequences["first"], third.shared_tokens) == (
        2,
        True,
        300,
    )
    bench.cancel("first")
    bench.step()
    assert third.joined, "there is room for the rest of it alone"
    bench.run()


def test_who_has_joined_keeps_nobody_else() -> None:
    """C2: each would keep the one before it, and that one the one before, prompts and all."""
    bench = with_one_that_runs(share=True)
    bench.submit("second", prompt=(*SYSTEM, *tail("second", 8)), max_tokens=30)
    bench.until(lambda: bool(bench.heard["second"].tokens))
    row = bench.scheduler._sequences["second"]
    assert (row.joined, row.prefix_peer, row.prefix_leader) == (True, None, None)
    bench.run()


def test_few_are_compared_and_the_closest_is_taken() -> None:
    bench = Bench(cache=True, block=4, blocks=400, max_running=20, share=True)
    for i in range(MAX_PEERS + 1):
        bench.submit(f"{i}", prompt=(*SYSTEM[: 40 + 40 * i], *tail(f"{i}")), max_tokens=40)
    bench.until(lambda: all(heard.tokens for heard in bench.heard.values()))
    bench.submit("late", prompt=(*SYSTEM, 1))
    bench.step()
    assert bench.scheduler._sequences["late"].shared_tokens == 40 * MAX_PEERS
    bench.run()


def test_two_prompts_without_room_for_both_do_not_keep_each_other_from_theirs() -> None:
    """The turn of one that has no room goes to the other, which may still have some in its last block."""
    bench = Bench(cache=True, share=True, block=16, blocks=13, prefill_tokens=8)
    rows = [bench.submit(name, prompt=150, max_tokens=2) for name in ("a", "b")]
    scheduler = bench.scheduler
    for request in rows:
        pop_head(scheduler)
        scheduler._admit(scheduler._sequences[request.id], bench.now)
    bench.run()
    for request in rows:
        bench.assert_undisturbed(request)


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(40))
def test_all_get_what_they_would_get_alone(seed: int) -> None:
    """However little room there is, whoever goes while others were let in on what it holds."""
    chance = random.Random(seed)
    bench = Bench(
        cache=True,
        share=True,
        max_running=chance.choice((4, 12)),
        prefill_tokens=chance.choice((32, 512)),
        lookahead=chance.choice((0, 1, 2)),
        block=4,
        blocks=chance.choice((130, 160, 250)),
    )
    rows, gone = [], set()
    for i in range(20):
        prompt = (*SYSTEM[: chance.choice((100, 400))], *tail(f"{i}", chance.randint(1, 60)))
        rows.append(bench.submit(f"{i}", prompt=prompt, max_tokens=chance.randint(1, 50)))
        for _ in range(chance.choice((0, 1, 5))):
            bench.step()
        if chance.random() < 0.15:
            gone.add(chance.choice(rows).id)
            bench.cancel(max(gone))
    bench.run(steps=6000)
    for request in rows:
        if request.id not in gone:
            bench.assert_undisturbed(request)
    bench.assert_idle()
