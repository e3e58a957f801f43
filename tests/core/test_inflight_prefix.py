"""Prompts that begin alike and come together: who waits for whom, for how long, and what is computed in all."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.drive import Bench, pop_head
from treadle.core import block_budget, inflight_prefix
from treadle.core.inflight_prefix import MAX_LEADERS, common_prefix, waits_for_prefix
from treadle.core.messages import CancelReason, Submit
from treadle.core.scheduler import MAX_STUCK_PLANS, MIN_SHARED_TOKENS
from treadle.core.sequence import Sequence
from treadle.core.states import Event

SYSTEM = tuple(range(300))


def tail(name: str, count: int = 20) -> tuple[int, ...]:
    """Tokens of its own."""
    chance = random.Random(name)
    return tuple(chance.randrange(1000, 2000) for _ in range(count))


def joined(bench: Bench) -> dict[str, int]:
    """Who joins in the last plan, with what."""
    return {admit.request.id: admit.cached_tokens for admit in bench.plan.admit}


# Who waits, and until when


def test_those_behind_the_first_wait_for_what_they_share_and_not_for_its_own_tail() -> None:
    """P9"""
    bench = Bench(cache=True, prefill_tokens=64)
    rows = [bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}", 200))) for i in range(4)]
    for _ in range(5):
        bench.step()
        assert [chunk.id for chunk in bench.plan.prefill] == ["0"]
    bench.step()
    assert joined(bench) == {"1": 300, "2": 300, "3": 300}
    assert all(bench.heard[row.id].admitted == 1 for row in rows), "they count as admitted"
    bench.run()
    assert bench.runner.computed == 300 + 4 * 199
    for request in rows:
        bench.assert_undisturbed(request)
    bench.assert_idle()


def test_what_is_in_flight_is_not_kept_yet() -> None:
    bench = Bench(cache=True, prefill_tokens=64, lookahead=2)
    for i in range(2):
        bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}", 400)))
    for _ in range(7):
        bench.step()
        assert "1" not in joined(bench)
    assert bench.plan.prefill[0].start > 300
    bench.step()
    assert joined(bench) == {"1": 300}
    bench.run()


def test_the_wait_is_over_once_the_last_shared_token_is_kept() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    for i in range(2):
        bench.submit(f"{i}", prompt=(*SYSTEM[:256], *tail(f"{i}", 400)))
    for _ in range(4):
        bench.step()
        assert "1" not in joined(bench)
    assert bench.scheduler._sequences["0"].committed_tokens == 256
    bench.step()
    assert joined(bench) == {"1": 256}
    bench.run()


def test_what_was_reused_is_kept_from_the_start() -> None:
    bench = Bench(cache=True, lookahead=1)
    bench.submit("before", prompt=SYSTEM)
    bench.run()
    bench.submit("a", prompt=(*SYSTEM, *tail("a")))
    bench.step()
    row = bench.scheduler._sequences["a"]
    assert (bench.scheduler.in_flight, row.cached_tokens, row.committed_tokens) == (1, 300, 300)
    bench.run()


def test_who_comes_while_the_lead_computes_waits_as_well() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    bench.submit("lead", prompt=(*SYSTEM, *tail("lead")))
    bench.step()
    bench.submit("late", prompt=(*SYSTEM, *tail("late")))
    bench.step()
    assert joined(bench) == {}
    bench.until(lambda: bool(bench.plan.admit))
    assert joined(bench) == {"late": 300}
    bench.run()


def test_a_chain_waits_link_by_link() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    second = (*SYSTEM, *tail("b", 100))
    prompts = {"c": (*second, *tail("c", 50)), "a": (*SYSTEM, *tail("a")), "b": (*second, *tail("d"))}
    for name in ("a", "b", "c"):
        bench.submit(name, prompt=prompts[name])
    bench.until(lambda: "b" in joined(bench))
    assert joined(bench) == {"b": 300}
    bench.until(lambda: "c" in joined(bench))
    assert joined(bench) == {"c": 400}
    bench.run()
    assert bench.runner.computed == len({*range(300)}) + 19 + 100 + 19 + 49


def test_two_trees_at_once_are_computed_once_each() -> None:
    bench = Bench(cache=True, prefill_tokens=256, max_running=8)
    for i in range(4):
        bench.submit(f"x{i}", prompt=(*SYSTEM, *tail(f"x{i}")))
        bench.submit(f"y{i}", prompt=(*SYSTEM[::-1], *tail(f"y{i}")))
    bench.step()
    assert joined(bench) == {"x0": 0, "y0": 0}
    bench.run()
    assert bench.runner.computed == 2 * 300 + 8 * 19


@pytest.mark.parametrize("length", [MIN_SHARED_TOKENS, MIN_SHARED_TOKENS + 1])
def test_a_beginning_has_to_be_worth_it(length: int) -> None:
    bench = Bench(cache=True)
    for i in range(2):
        bench.submit(f"{i}", prompt=(*SYSTEM[: length - 1], *tail(f"{i}")))
    bench.step()
    assert len(bench.plan.admit) == (2 if length == MIN_SHARED_TOKENS else 1)
    bench.run()


def test_what_the_lead_reused_itself_is_not_worth_a_wait() -> None:
    bench = Bench(cache=True, prefill_tokens=1)
    bench.submit("before", prompt=SYSTEM)
    bench.run()
    for i in range(2):
        bench.submit(f"{i}", prompt=(*SYSTEM, *tail("same", MIN_SHARED_TOKENS - 10), *tail(f"{i}")))
    bench.step()
    assert joined(bench) == {"0": 300, "1": 300}
    bench.run()


def test_other_salts_wait_for_nobody() -> None:
    bench = Bench(cache=True)
    for salt in ("one", "two"):
        bench.submit(salt, prompt=SYSTEM, salt=salt)
    bench.step()
    assert joined(bench) == {"one": 0, "two": 0}
    bench.run()


@pytest.mark.parametrize("scored", [0, 1])
def test_a_scored_row_neither_leads_nor_waits(scored: int) -> None:
    bench = Bench(cache=True)
    for i in range(2):
        bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}")), prompt_logprobs=0 if i == scored else None)
    bench.step()
    assert joined(bench) == {"0": 0, "1": 0}
    bench.run()


def test_nobody_waits_for_what_a_third_one_has_kept() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    bench.submit("scored", prompt=(*SYSTEM, *tail("scored")), prompt_logprobs=0)
    bench.until(lambda: bench.scheduler._sequences["scored"].committed_tokens == 192)
    bench.submit("lead", prompt=(*SYSTEM, *tail("lead")))
    bench.step()
    bench.step()
    bench.submit("late", prompt=(*SYSTEM, *tail("late")))
    lead = bench.scheduler._sequences["lead"]
    assert (lead.cached_tokens, lead.committed_tokens) == (192, 256)
    bench.step()
    assert joined(bench) == {"late": 256}
    bench.run()


def test_once_joined_a_row_does_not_stop_for_others() -> None:
    bench = Bench(cache=True, prefill_tokens=32)
    bench.submit("scored", prompt=SYSTEM, prompt_logprobs=0)
    bench.submit("a", prompt=SYSTEM)
    bench.step()
    bench.submit("b", prompt=SYSTEM)
    bench.step()
    assert {chunk.id for chunk in bench.plan.prefill} == {"scored", "a"}
    bench.run()


# Where only what was asked for is kept


def test_a_lead_is_asked_to_keep_what_others_wait_for_until_it_has_it() -> None:
    bench = Bench(cache=True, marked=True, prefill_tokens=128)
    prompts = {"lead": (*SYSTEM, *tail("lead")), "b": (*SYSTEM, *tail("b")), "c": (*SYSTEM[:200], *tail("c"))}
    for name, prompt in prompts.items():
        bench.submit(name, prompt=prompt)
    asked = []
    while "b" not in joined(bench):
        bench.step()
        asked += [chunk for chunk in bench.plan.prefill if chunk.id == "lead" and chunk.start < 300]
    assert len(asked) > 2
    assert all(chunk.checkpoints == tuple(count for count in (200, 300) if count > chunk.start) for chunk in asked)
    assert bench.heard["c"].cached == [200]
    assert joined(bench)["b"] == 300
    bench.run()


def test_nobody_is_asked_where_all_that_rows_compute_is_kept() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    for i in range(3):
        bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}")))
    bench.until(lambda: "1" in joined(bench))
    assert not [chunk for chunk in bench.plan.prefill if chunk.checkpoints]


def test_what_a_row_that_runs_was_not_asked_to_keep_is_computed_once_more() -> None:
    """By the first of those who come for it; the others wait."""
    bench = Bench(cache=True, marked=True, max_running=8)
    bench.submit("before", prompt=(*SYSTEM, *tail("before")), max_tokens=50)
    bench.until(lambda: bool(bench.heard["before"].tokens))
    for i in range(3):
        bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}")))
    bench.step()
    assert joined(bench) == {"0": 0}
    bench.run()
    assert [bench.heard[f"{i}"].cached for i in range(3)] == [[0], [300], [300]]


# Leads that go


def test_where_the_lead_is_cancelled_the_next_one_goes_on_from_what_it_kept() -> None:
    bench = Bench(cache=True, prefill_tokens=64, lookahead=1)
    rows = [bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}"))) for i in range(3)]
    bench.step()
    bench.step()
    bench.cancel("0", CancelReason.CLIENT)
    bench.step()
    assert joined(bench) == {"1": 64}
    assert bench.scheduler._sequences["2"].prefix_leader is bench.scheduler._sequences["1"]
    bench.run()
    for request in rows[1:]:
        bench.assert_undisturbed(request)
    bench.assert_idle()


def test_where_the_lead_fails_the_next_one_leads() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    rows = [bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}"))) for i in range(3)]
    bench.step()
    bench.runner.failures["0"] = "gone"
    bench.step()
    bench.step()
    assert joined(bench) == {"1": 64}
    bench.run()
    for request in rows[1:]:
        bench.assert_undisturbed(request)


def test_a_lead_that_is_preempted_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)
    bench = Bench(cache=True, prefill_tokens=4, block=4, blocks=180, max_running=8)
    old = [bench.submit(f"old {i}", prompt=(i,), max_tokens=150) for i in range(6)]
    bench.step()
    rows = [bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}"))) for i in range(2)]
    bench.until(lambda: bench.statistics().preempted > 0)
    assert (bench.scheduler._sequences["0"].joined, bench.scheduler._sequences["1"].prefix_leader) == (
        False,
        bench.scheduler._sequences["0"],
    )
    bench.run()
    for request in (*old, *rows):
        bench.assert_undisturbed(request)
    bench.assert_idle()


def test_who_was_preempted_waits_for_others_as_if_it_were_new() -> None:
    bench = Bench(cache=True, prefill_tokens=64)
    request = bench.submit("a", prompt=(*SYSTEM, *tail("a")))
    bench.step()
    bench.runner.stored.clear()  # what it had is given to others
    scheduler = bench.scheduler
    scheduler._preempt([scheduler._sequences["a"]], bench.now)
    bench.release(scheduler.take_released_ids())
    bench.submit("urgent", prompt=(*SYSTEM, *tail("urgent")), priority=-1)
    running = scheduler._sequences["urgent"]
    pop_head(scheduler)
    pop_head(scheduler)
    for row in (running, scheduler._sequences["a"]):
        scheduler._admit(row, bench.now)
    bench.step()
    assert joined(bench) == {"urgent": 0}
    bench.run()
    bench.assert_undisturbed(request)


def test_a_lead_without_memory_does_not_hold_others_for_ever() -> None:
    bench = Bench(cache=True, block=4, blocks=200, prefill_tokens=64)
    for i in range(3):
        bench.submit(f"{i}", prompt=(*SYSTEM, *tail(f"{i}")))
    bench.step()
    bench.runner.free_blocks = lambda: 0  # type: ignore[method-assign]
    bench.run(steps=3 * MAX_STUCK_PLANS + 20)
    assert all(heard.finish is not None for heard in bench.heard.values())
    bench.assert_idle()


def test_who_has_no_room_to_join_keeps_nobody_waiting() -> None:
    bench = Bench(cache=True, block=4, blocks=160, max_running=4, prefill_tokens=512)
    bench.submit("old", prompt=(1,) * 200, max_tokens=100)
    bench.until(lambda: bool(bench.heard["old"].tokens))
    scheduler = bench.scheduler
    bench.submit("big", prompt=(*SYSTEM, *tail("big", 200)))
    pop_head(scheduler)
    scheduler._admit(scheduler._sequences["big"], bench.now)
    small = bench.submit("small", prompt=SYSTEM[:100])
    pop_head(scheduler)
    scheduler._admit(scheduler._sequences["small"], bench.now)
    bench.step()
    assert joined(bench) == {"small": 0}
    bench.run()
    bench.assert_undisturbed(small)


# What it comes to


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(60))
def test_what_many_share_is_computed_once(seed: int) -> None:
    """However they come, whatever is in flight, whoever decodes beside them (P9)."""
    chance = random.Random(seed)
    block, marked = chance.choice((1, 4, 16, 32)), chance.random() < 0.3
    bench = Bench(
        cache=True,
        max_running=chance.choice((3, 8, 20)),
        prefill_tokens=chance.choice((16, 40, 64, 512)),
        lookahead=0 if marked else chance.choice((0, 1, 2)),
        block=block,
        blocks=chance.choice((0, 6000 // block)),
        share=chance.random() < 0.5,
        marked=marked,
    )
    bench.runner.cost = lambda prefill, decode: (0.002 + 0.001 * prefill, 0.02 if decode else 0.0)
    others = [bench.submit(f"other {i}", prompt=3, max_tokens=60) for i in range(chance.choice((0, 0, 2)))]
    bench.step()
    size, computed = chance.randint(MIN_SHARED_TOKENS, 400), bench.runner.computed
    system = tuple(chance.randrange(900) for _ in range(size))
    tails = [chance.randint(1, 60) for _ in range(chance.randint(2, 12))]
    rows = []
    for i, count in enumerate(tails):
        rows.append(bench.submit(f"{i}", prompt=(*system, *tail(f"{i}", count))))
        for _ in range(chance.choice((0, 0, 1, 3))):
            bench.step()
    bench.run()
    for request in (*others, *rows):
        bench.assert_undisturbed(request)
    most = size + sum(tails) - len(tails) + (len(tails) - 1) * (block - 1) + sum(len(r.prompt) - 1 for r in others)
    assert bench.runner.computed - computed <= most
    bench.assert_idle()


def all_heard(bench: Bench, count: int) -> bool:
    return all(bench.heard[f"{i}"].tokens for i in range(count))


def test_a_burst_of_those_who_wait_takes_more_of_the_time_than_one_prompt() -> None:
    """Beside rows that decode, prefill gets its share for all who wait for it, though one computes."""
    taken = []
    for count in (1, 12):
        bench = Bench(cache=True, max_running=20)
        bench.runner.cost = lambda prefill, decode: (0.001 * prefill, 0.02 if decode else 0.0)
        bench.submit("other", prompt=(1,) * 40, max_tokens=500)
        for _ in range(20):
            bench.step()
        for i in range(count):
            bench.submit(f"{i}", prompt=(*SYSTEM, *SYSTEM, *tail(f"{i}")))
        began = bench.now
        bench.until(functools.partial(all_heard, bench, count))
        taken.append(bench.now - began)
    assert taken[1] < 0.8 * taken[0]


# Comparing


@given(st.integers(0, 700), st.lists(st.integers(0, 1), max_size=80), st.lists(st.integers(0, 1), max_size=80))
def test_shared_is_what_both_begin_with_but_the_last(same: int, a: list[int], b: list[int]) -> None:
    one, two = (*range(same), *a, 0), (*range(same), *b, 1)
    most = min(len(one), len(two)) - 1
    assert common_prefix(one, two) == next((i for i in range(most) if one[i] != two[i]), most)


def _running(id_: str, prompt: tuple[int, ...], *, joined: bool = True, kept: int = 0, reused: int = 0) -> Sequence:
    row = Sequence(Submit(id=id_, prompt=prompt, max_tokens=4), order=0, arrived=0.0, joined=joined)
    row.committed_tokens, row.cached_tokens = kept, reused
    row.on(Event.ADMIT)
    return row


def _new(prompt: tuple[int, ...]) -> Sequence:
    return _running("row", prompt, joined=False)


@pytest.mark.parametrize("kept", [300 - MIN_SHARED_TOKENS, 301 - MIN_SHARED_TOKENS])
def test_a_third_one_has_to_have_kept_so_much_that_the_rest_is_not_worth_a_wait(kept: int) -> None:
    lead = _running("lead", (*SYSTEM, *tail("lead")))
    other = _running("other", (*SYSTEM, *tail("other")), kept=kept)
    other.on(Event.PROMPT_DONE)
    assert waits_for_prefix(_new((*SYSTEM, *tail("row"))), [other, lead], MIN_SHARED_TOKENS) is (
        kept == 300 - MIN_SHARED_TOKENS
    )


@pytest.mark.parametrize("at", [0, 100, 235, 236])
def test_what_a_third_one_has_kept_of_another_prompt_is_no_use(at: int) -> None:
    other = _running("other", (*SYSTEM[:at], 7777, *SYSTEM[at + 1 :]), kept=299)
    other.on(Event.PROMPT_DONE)
    assert waits_for_prefix(_new(SYSTEM), [_running("lead", SYSTEM), other], MIN_SHARED_TOKENS) is (at < 236)


@pytest.mark.parametrize("at", [99, 100, 130, 163, 164])
def test_a_prompt_that_is_alike_further_on_only_is_no_lead(at: int) -> None:
    lead = _running("lead", (*SYSTEM[:at], 7777, *SYSTEM[at + 1 :]), kept=100, reused=100)
    assert waits_for_prefix(_new(SYSTEM), [lead], MIN_SHARED_TOKENS) is (at == 164)


def test_nobody_waits_on_for_a_lead_that_has_to_join_again() -> None:
    lead, row = _running("lead", SYSTEM), _new(SYSTEM)
    assert waits_for_prefix(row, [lead], MIN_SHARED_TOKENS)
    lead.joined = False
    assert not waits_for_prefix(row, [], MIN_SHARED_TOKENS)


@settings(max_examples=20)
@given(st.integers(2, 40))
def test_few_leads_are_compared_and_only_once_for_a_wait(count: int) -> None:
    """Those that only seem to be leads: they begin alike, and have kept it."""
    leads = [_running(f"{i}", (*SYSTEM, *tail(f"{i}")), kept=300) for i in range(count)]
    row = _new((*SYSTEM, *tail("row")))
    compared: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inflight_prefix, "common_prefix", lambda a, b: compared.append(b) or common_prefix(a, b))
        assert not waits_for_prefix(row, leads, MIN_SHARED_TOKENS)
        assert len(compared) == min(count, MAX_LEADERS)
        for lead in leads:
            lead.committed_tokens = 0
        compared.clear()
        for _ in range(5):
            assert waits_for_prefix(row, leads, MIN_SHARED_TOKENS)
        assert len(compared) == 1
