"""Rows that outgrow the cache: who gives way, that nothing is lost or doubled, and that all get there."""

from __future__ import annotations

import random

import pytest

from tests.core.drive import Bench
from treadle.core import block_budget
from treadle.core.messages import FinishReason
from treadle.core.scheduler import MAX_STUCK_PLANS


@pytest.fixture(autouse=True)
def _greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is expected to generate much, so that rows come in which do not fit in the end."""
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)


def names(bench: Bench) -> list[str]:
    return [decode.id for decode in bench.plan.decode]


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(80))
def test_all_get_what_they_would_get_alone(seed: int) -> None:
    """However little room there is beyond what the largest needs, and whatever is in flight."""
    chance = random.Random(seed)
    block = chance.choice((1, 4, 16))
    bench = Bench(
        max_running=chance.choice((2, 5, 16)),
        prefill_tokens=chance.choice((8, 64)),
        lookahead=chance.choice((0, 1, 2)),
        drafts=chance.choice((0, 0, 3)),
        block=block,
        blocks=-(-60 // block) * chance.choice((1, 1, 2, 3)),
        cache=chance.random() < 0.5,
        share=chance.random() < 0.5,
    )
    requests = []
    for i in range(25):
        prompt = chance.choice((chance.randint(1, 20), tuple(range(20))))
        tokens = chance.randint(1, 40)
        requests.append(bench.submit(f"{i}", prompt=prompt, max_tokens=tokens, priority=chance.choice((0, 0, 1))))
        for _ in range(chance.choice((0, 1, 9))):
            bench.step()
    bench.run(steps=6000)
    for request in requests:
        bench.assert_undisturbed(request)
        assert bench.heard[request.id].admitted == 1, "admitted is told once"
    bench.assert_idle()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_newest_gives_way_and_comes_back_with_its_tokens(lookahead: int) -> None:
    bench = Bench(block=4, blocks=8, lookahead=lookahead)
    first, second = (bench.submit(name, prompt=4, max_tokens=24) for name in ("first", "second"))
    bench.until(lambda: bench.statistics().preempted == 1)
    assert bench.preempted == ("second",)
    assert names(bench) in (["first"], [])
    now = bench.statistics()
    assert (now.running, now.waiting) == (1, 1)
    told = list(bench.heard["second"].tokens)
    bench.until(lambda: bool(bench.plan.admit))
    assert bench.heard["first"].finish is not None, "it stays out until there is room for it"
    (admit,) = bench.plan.admit
    assert list(admit.history) == told
    bench.run()
    bench.assert_undisturbed(first)
    bench.assert_undisturbed(second)
    assert bench.statistics().preempted == 1
    bench.assert_idle()


def test_the_worst_priority_gives_way_before_the_newest() -> None:
    bench = Bench(block=4, blocks=8)
    bench.submit("patient", prompt=4, max_tokens=24, priority=1)
    bench.step()
    bench.submit("urgent", prompt=4, max_tokens=24)
    bench.until(lambda: bench.statistics().preempted == 1)
    assert bench.preempted == ("patient",)
    bench.run()


def test_who_was_first_keeps_its_claim_when_it_is_sent_later() -> None:
    """After the engine was lost sequences are sent again in another order than they came in."""
    bench = Bench(block=4, blocks=8)
    newer = bench.submit("newer", prompt=4, max_tokens=24, arrival=2, resumed=True)
    older = bench.submit("older", prompt=4, max_tokens=24, arrival=1, resumed=True)
    bench.until(lambda: bench.statistics().preempted == 1)
    assert bench.preempted == ("newer",)
    bench.run()
    for request in (older, newer):
        bench.assert_undisturbed(request)


def test_who_was_preempted_goes_before_those_who_never_ran_and_never_expires() -> None:
    """D2: it was admitted, so its answer has begun."""
    bench = Bench(block=4, blocks=8)
    bench.submit("first", prompt=4, max_tokens=24)
    request = bench.submit("second", prompt=4, max_tokens=24, max_wait_s=0.01)
    bench.step()
    bench.submit("urgent", prompt=20, max_tokens=2, priority=-1)
    bench.until(lambda: bench.statistics().preempted == 1)
    assert bench.heard["urgent"].admitted == 0
    bench.until(lambda: bool(bench.plan.admit))
    assert bench.plan.admit[0].request.id == "second"
    bench.run()
    bench.assert_undisturbed(request)


def test_an_end_in_flight_comes_before_a_preemption() -> None:
    """Steps in flight are finished first: whoever ends in them leaves room."""
    bench = Bench(block=4, blocks=4, lookahead=1)
    bench.submit("long", prompt=4, max_tokens=10)
    bench.submit("short", prompt=4, max_tokens=5)
    bench.run()
    assert bench.statistics().preempted == 0
    assert bench.runner.least_room == 0


def test_a_cancel_while_it_waits_to_come_back_ends_it_once() -> None:
    """B3"""
    bench = Bench(block=4, blocks=8)
    bench.submit("first", prompt=4, max_tokens=24)
    bench.submit("second", prompt=4, max_tokens=24)
    bench.until(lambda: bench.statistics().preempted == 1)
    bench.cancel("second")
    bench.run()
    finish = bench.heard["second"].finish
    assert finish is not None
    assert finish.reason is FinishReason.CANCELLED
    bench.assert_idle()


def test_a_prompt_with_the_best_claim_is_not_kept_waiting_by_newer_rows() -> None:
    bench = Bench(max_running=8, prefill_tokens=4, block=4, blocks=16)
    first = bench.submit("first", prompt=50, max_tokens=10)
    for _ in range(3):
        bench.step()
    rows = [bench.submit(f"{i}", prompt=1, max_tokens=30) for i in range(4)]
    bench.until(lambda: bench.heard["first"].first_token is not None, steps=60)
    bench.run()
    for request in (first, *rows):
        bench.assert_undisturbed(request)


def test_a_step_that_raises_while_rows_wait_to_come_back_costs_nobody() -> None:
    """B7"""
    bench = Bench(block=4, blocks=12, lookahead=1)
    requests = [bench.submit(f"{i}", prompt=4, max_tokens=24) for i in range(4)]
    bench.until(lambda: bench.statistics().preempted > 0)
    bench.runner.raises_late = lambda plan: bench.raised == 0
    bench.run()
    assert bench.raised == 1
    for request in requests:
        bench.assert_undisturbed(request)


def test_a_runner_that_has_no_room_for_one_row_alone_ends_it_with_an_error() -> None:
    """Nobody waits for memory that does not come: what the runner says of its room is not what it promised."""
    bench = Bench(block=4, blocks=8)
    bench.submit("a", prompt=7, max_tokens=9)
    bench.runner.free_blocks = lambda: 0  # type: ignore[method-assign]
    bench.run(steps=MAX_STUCK_PLANS + 6)
    finish = bench.heard["a"].finish
    assert finish is not None
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "engine_step_failed")
    assert "no room" in finish.message
    bench.assert_idle()


def test_what_can_never_fit_alone_is_refused() -> None:
    bench = Bench(block=4, blocks=8)
    bench.submit("huge", prompt=20, max_tokens=13)
    request = bench.submit("fits", prompt=20, max_tokens=12)
    bench.run()
    finish = bench.heard["huge"].finish
    assert finish is not None
    assert finish.code == "context_length_exceeded"
    assert "it holds 32 tokens" in finish.message
    assert "--memory" in finish.message
    bench.assert_undisturbed(request)


def test_a_row_comes_in_where_there_is_room_for_what_is_expected_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 20)
    bench = Bench(block=4, blocks=8)
    bench.submit("first", prompt=8, max_tokens=4)
    bench.step()
    second = bench.submit("second", prompt=4, max_tokens=24)
    bench.step()
    assert bench.heard["second"].admitted == 0, "six blocks for it, one to grow for the first, and five are left"
    bench.run()
    bench.assert_undisturbed(second)


def test_rows_that_ask_for_much_come_in_on_what_is_expected_of_them() -> None:
    bench = Bench(max_running=8, block=4, blocks=32)
    for i in range(6):
        bench.submit(f"{i}", prompt=4, max_tokens=120)
    bench.step()
    assert len(bench.plan.admit) == 6
