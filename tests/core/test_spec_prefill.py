"""Prompts that are prefilled in part: what is kept of them, their books, and the plans that score them."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.drive import Bench
from tests.core.scoring import chosen
from treadle.core.capabilities import SpecPrefillCapabilities, StepCost
from treadle.core.chunk_limits import Work
from treadle.core.messages import CancelReason, Pooling, Submit
from treadle.core.outputs import Outputs
from treadle.core.plan import RowKept, StepPlan, StepResult
from treadle.core.prefill_budget import PrefillBudget
from treadle.core.scheduler import Scheduler
from treadle.core.sequence import Sequence
from treadle.core.sparse_prompt import (
    LOOK_AHEAD,
    LOOK_AHEAD_UNITS,
    SparsePrompt,
    kept_chunks,
    kept_tokens,
    longest_scored,
)
from treadle.core.spec_prefill import SpecPrefill

KEEP = 0.25
LONG = 1000
CAN = SpecPrefillCapabilities(scorer="tiny", keep=KEEP, min_tokens=600, longest=4000, rows=2)


def bench(keep: float = KEEP, *, scorer: dict[str, Any] | None = None, **options: Any) -> Bench:
    can = SpecPrefillCapabilities(
        **{"scorer": "tiny", "keep": keep, "min_tokens": 600, "longest": 4000, "rows": 2, **(scorer or {})}
    )
    return Bench(**{"prefill_tokens": 200, "scorer": can, **options})


# What is kept --------------------------------------------------------------------------------------------------------


@given(st.integers(2, 3000), st.floats(0.01, 1.0))
def test_the_number_of_kept_tokens_is_known_before(length: int, keep: float) -> None:
    kept = kept_tokens(length, keep)
    assert 0 < kept <= length
    assert kept == len(chosen(tuple(range(length)), 0, keep))
    assert kept_tokens(length, 1.0) == length
    assert length < 1000 or kept <= keep * length + 11 * 32


def test_the_longest_scored_prompt_leaves_room_for_an_answer_and_a_look_ahead() -> None:
    assert longest_scored(1000, 5000) == 999
    assert longest_scored(5000, 1000) == 1000 - LOOK_AHEAD


def test_a_share_that_floats_miss_by_a_hair_keeps_no_chunk_more() -> None:
    assert kept_chunks(300, 0.1) == 30
    assert kept_chunks(5, 0.1) == 5


@given(st.integers(2, 900), st.integers(0, 500), st.floats(0.05, 1.0), st.data())
def test_positions_are_those_of_prompt_and_history(scored: int, start: int, keep: float, data: st.DataObject) -> None:
    length = start + scored
    sparse = SparsePrompt.of(length, start, keep)
    kept = chosen(tuple(range(length)), start, keep)
    sparse.choose(kept)
    line = [*range(start), *kept, *range(length, length + 50)]
    at = data.draw(st.integers(0, len(line)))
    count = data.draw(st.integers(0, len(line) - at))
    assert list(sparse.positions(at, count)) == line[at : at + count]
    assert line[: sparse.lead] == list(range(sparse.lead))
    assert line[sparse.lead : sparse.lead + 1] != [sparse.lead] or sparse.lead == sparse.kept
    reached = [sparse.reached(count) for count in range(sparse.kept + 3)]
    assert reached[0] == 0
    assert reached[-1] == length
    assert all(a <= b for a, b in pairwise(reached))


@pytest.mark.parametrize("positions", [(0, 1), tuple(range(320)), (*range(318), 999, 998), (*range(319), 1000)])
def test_other_positions_than_asked_for_are_a_fault(positions: tuple[int, ...]) -> None:
    sparse = SparsePrompt.of(LONG, 0, KEEP)
    with pytest.raises(AssertionError, match="ascending positions"):
        sparse.choose(positions)


def test_progress_before_a_prompt_is_scored_is_that_of_its_cached_tokens() -> None:
    sparse = SparsePrompt.of(LONG, 64, KEEP)
    assert [sparse.reached(count) for count in (0, 64, 70)] == [0, 64, 70]


# Lives ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_long_prompt_is_scored_and_prefilled_in_part(lookahead: int) -> None:
    b = bench(lookahead=lookahead)
    request = b.submit("a", prompt=LONG, max_tokens=6)
    b.run()
    kept = kept_tokens(LONG, KEEP)
    b.assert_undisturbed(request, KEEP)
    assert b.heard["a"].kept == [(LONG, kept)]
    assert b.heard["a"].prompt_done[-1] == LONG
    assert (b.runner.scorer.computed, b.runner.computed) == (LONG - 1, kept - 1)
    found = b.statistics().spec_prefill
    assert (found.prompts, found.scored_tokens, found.kept_tokens, found.failed) == (1, LONG, kept, 0)
    b.assert_idle()


def test_all_of_a_prompt_kept_is_a_plain_prefill() -> None:
    b = bench(1.0, cache=True)
    request = b.submit("a", prompt=LONG, max_tokens=6)
    b.run()
    b.assert_undisturbed(request)
    assert b.heard["a"].kept == [(LONG, LONG)]


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": 599},
        {"prompt": 4001},
        {"sparse_prefill": False},
        {"prompt_logprobs": 0},
        {"max_tokens": 0},
        {"max_tokens": 0, "pooling": Pooling.LAST},
    ],
)
def test_other_prompts_are_prefilled_whole(options: dict[str, Any]) -> None:
    b = bench()
    request = b.submit("a", **{"prompt": LONG, **options})
    b.run()
    b.assert_undisturbed(request)
    assert not b.heard["a"].kept
    assert not b.runner.scorer.computed
    assert b.runner.computed >= len(request.prompt) - 1


def test_without_a_scorer_prompts_are_prefilled_whole() -> None:
    b = Bench()
    request = b.submit("a", prompt=LONG, sparse_prefill=True)
    b.run()
    b.assert_undisturbed(request)


def test_a_cached_prefix_is_kept_whole_and_what_is_behind_it_is_scored() -> None:
    b = bench(cache=True, block=16)
    shared = tuple(range(400))
    b.submit("first", prompt=(*shared, 1, 2), max_tokens=1)
    b.run()
    prompt = (*shared, *(500 + i % 400 for i in range(700)))
    b.submit("second", prompt=prompt, max_tokens=4)
    stored = set(b.runner.stored)
    b.run()
    assert b.heard["second"].cached == [400]
    assert b.heard["second"].kept == [(700, 400 + kept_tokens(700, KEEP))]
    assert b.heard["second"].prompt_done[0] == 400
    assert stored == set(b.runner.stored), "what is prefilled in part is not stored"


def test_a_prompt_of_which_little_is_not_cached_is_prefilled_whole() -> None:
    b = bench(cache=True, block=16)
    shared = tuple(range(400))
    b.submit("first", prompt=(*shared, 1, 2), max_tokens=1)
    b.run()
    request = b.submit("second", prompt=(*shared, *(500 + i for i in range(400))), max_tokens=4)
    b.run()
    b.assert_undisturbed(request)
    assert b.heard["second"].kept == [(0, 0)]
    assert not b.runner.scorer.computed


def test_equal_prompts_share_nothing_but_what_the_scorer_has_computed() -> None:
    b = bench(cache=True, share=True, block=16)
    prompt = tuple(range(LONG))
    first, second = (b.submit(id_, prompt=prompt, max_tokens=4) for id_ in ("a", "b"))
    b.run()
    third = b.submit("c", prompt=prompt, max_tokens=4)
    computed = b.runner.scorer.computed
    b.run()
    for request in (first, second, third):
        b.assert_undisturbed(request, KEEP)
    assert b.heard["c"].cached == [0]
    assert b.runner.scorer.computed - computed == (LONG - 1) % 16


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_of_several_sequences_is_scored_once(lookahead: int) -> None:
    """Beside one whose tokens are others, and one of another tenant."""
    b = bench(lookahead=lookahead, max_running=6)
    prompt = tuple(range(LONG))
    requests = [b.submit(f"{i}", prompt=prompt, max_tokens=4) for i in range(4)]
    requests.append(b.submit("tenant", prompt=prompt, max_tokens=4, salt="t"))
    requests.append(b.submit("other", prompt=(*prompt[:-1], 7), max_tokens=4))
    plans = _plans(b)
    for request in requests:
        b.assert_undisturbed(request, KEEP)
    assert {chunk.id for plan in plans for chunk in plan.score} == {"0", "tenant", "other"}
    assert b.statistics().spec_prefill.prompts == 3
    b.assert_idle()


@pytest.mark.parametrize("comes_back", [False, True])
def test_another_sequence_with_the_prompt_takes_over(comes_back: bool) -> None:
    b = bench(max_running=4)
    prompt = tuple(range(LONG))
    first, *others = [b.submit(f"{i}", prompt=prompt, max_tokens=4) for i in range(3)]
    b.until(lambda: b.runner.scorer.computed > 100)
    (seq,) = [seq for seq in b.scheduler._running.values() if seq.sparse is not None and seq.sparse.begun]
    if comes_back:
        b.scheduler._preempt([seq], b.now)
    else:
        b.cancel(seq.id)
    b.run()
    for request in others if not comes_back else (first, *others):
        b.assert_undisturbed(request, KEEP)
    assert LONG < b.runner.scorer.computed < 2 * LONG
    b.assert_idle()


def test_nobody_waits_for_a_prompt_that_is_prefilled_in_part() -> None:
    b = bench(cache=True, share=True, block=16)
    prompt = tuple(range(LONG))
    b.submit("sparse", prompt=prompt, max_tokens=4)
    b.step()
    dense = b.submit("dense", prompt=prompt, max_tokens=4, sparse_prefill=False)
    late = b.submit("late", prompt=prompt, max_tokens=4)
    b.run()
    assert not b.waits
    b.assert_undisturbed(dense)
    b.assert_undisturbed(late, KEEP)
    assert b.heard["dense"].cached == [0]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_cannot_be_scored_is_prefilled_whole(lookahead: int) -> None:
    b = bench(lookahead=lookahead, block=16, blocks=80)
    b.runner.scorer.fails.add("a")
    request = b.submit("a", prompt=LONG, max_tokens=6)
    b.run()
    b.assert_undisturbed(request)
    assert b.heard["a"].kept == [(LONG, kept_tokens(LONG, KEEP)), (0, 0)]
    found = b.statistics().spec_prefill
    assert (found.prompts, found.failed, found.reason) == (0, 1, "it can't be scored")


def test_a_scorer_that_has_lost_cached_tokens_begins_anew() -> None:
    b = bench(block=16)
    prompt = tuple(range(LONG))
    b.submit("a", prompt=prompt, max_tokens=2)
    b.run()
    b.runner.scorer.evicts.add("b")
    request = b.submit("b", prompt=prompt, max_tokens=4)
    b.run()
    b.assert_undisturbed(request, KEEP)
    assert b.runner.scorer.computed == 2 * (LONG - 1)
    b.assert_idle()


def test_a_scorer_that_raises_when_asked_fails_the_one_request() -> None:
    b = bench()

    def raises(request: Submit) -> int:
        raise ValueError("no")

    b.scheduler._spec_prefill._match = raises
    b.submit("a", prompt=LONG)
    with pytest.raises(Exception, match="a can't join") as raised:
        b.step()
    b.hear(b.scheduler.recover_planning("no", raised.value.id))  # type: ignore[attr-defined]
    b.run()
    finish = b.heard["a"].finish
    assert finish is not None
    assert finish.code == "engine_step_failed"
    b.assert_idle()


def test_a_scorer_without_a_cache_computes_each_prompt() -> None:
    b = bench(block=16)
    b.scheduler = Scheduler(b.scheduler.limits, b.runner.match_prefix)
    for id_ in ("a", "b"):
        b.submit(id_, prompt=tuple(range(LONG)), max_tokens=2)
        b.run()
    assert b.runner.scorer.computed == 2 * (LONG - 1)


def test_a_second_result_for_a_prompt_is_a_fault() -> None:
    seq = Sequence.of(Submit(id="a", prompt=tuple(range(LONG)), max_tokens=1), order=1, now=0.0)
    with pytest.raises(AssertionError, match="scored once"):
        SpecPrefill(CAN, Outputs()).settle(seq, RowKept("a", ()), [seq])


# Memory --------------------------------------------------------------------------------------------------------------


def test_memory_is_taken_for_what_is_kept() -> None:
    b = bench(block=16, blocks=80)
    first = b.submit("a", prompt=LONG, max_tokens=40)
    second = b.submit("b", prompt=LONG, max_tokens=40)
    b.until(lambda: len(b.heard["a"].tokens) > 1 and len(b.heard["b"].tokens) > 1)
    b.run()
    for request in (first, second):
        b.assert_undisturbed(request, KEEP)
    assert b.runner.least_room >= 80 - 2 * (kept_tokens(LONG, KEEP) + 40 + 32) // 16


def test_a_prompt_that_would_not_fit_whole_is_refused() -> None:
    b = bench(block=16, blocks=60)
    b.submit("a", prompt=LONG, max_tokens=4)
    b.hear(b.scheduler.flush())
    finish = b.heard["a"].finish
    assert finish is not None
    assert finish.code == "context_length_exceeded"


def test_a_preempted_sequence_keeps_what_was_chosen() -> None:
    b = bench(block=16, blocks=70, prefill_tokens=400, lookahead=1)
    first = b.submit("a", prompt=LONG, max_tokens=30)
    second = b.submit("b", prompt=700, max_tokens=400)
    third = b.submit("c", prompt=700, max_tokens=400)
    b.run()
    for request in (first, second, third):
        b.assert_undisturbed(request, KEEP)
    assert b.statistics().preempted
    assert b.statistics().spec_prefill.prompts == 3


def test_a_preempted_sequence_reuses_its_cached_prefix_again() -> None:
    b = bench(cache=True, block=16)
    shared = tuple(range(400))
    b.submit("first", prompt=(*shared, 1, 2), max_tokens=1)
    b.run()
    b.submit("second", prompt=(*shared, *(500 + i % 400 for i in range(700))), max_tokens=9)
    b.until(lambda: len(b.heard["second"].tokens) == 3)
    (seq,) = b.scheduler._running.values()
    b.scheduler._preempt([seq], b.now)
    computed = b.runner.computed
    b.run()
    assert seq.sparse is not None
    assert seq.sparse.lead >= 400
    assert b.runner.computed - computed == kept_tokens(700, KEEP) + 3 - 1
    assert b.statistics().spec_prefill.prompts == 1


def test_a_sequence_that_is_preempted_while_it_is_scored_is_scored_again() -> None:
    b = bench()
    request = b.submit("a", prompt=LONG, max_tokens=5)
    b.until(lambda: b.runner.scorer.computed > 100)
    (seq,) = b.scheduler._running.values()
    b.scheduler._preempt([seq], b.now)
    b.run()
    b.assert_undisturbed(request, KEEP)
    assert b.runner.scorer.computed > LONG


# Plans ---------------------------------------------------------------------------------------------------------------


def _plans(b: Bench, steps: int = 300) -> list[StepPlan]:
    plans = []
    for _ in range(steps):
        if not b.scheduler.has_work:
            break
        b.step()
        plans.append(b.plan)
    return plans


def test_prompts_are_scored_in_places_and_memory_of_the_scorer() -> None:
    room = 2 * -(-(LONG + LOOK_AHEAD) // 16)
    b = bench(scorer={"rows": 3, "blocks": room, "block": 16}, max_running=6)
    requests = [b.submit(f"{i}", prompt=LONG, max_tokens=4) for i in range(6)]
    plans = _plans(b)
    for request in requests:
        b.assert_undisturbed(request, KEEP)
    scored = [[chunk.id for chunk in plan.score] for plan in plans if plan.score]
    assert scored[0] == ["0", "1"]
    assert max(map(len, scored)) == 2


def test_steps_score_and_prefill_in_turn() -> None:
    b = bench(max_running=4)
    b.submit("dense", prompt=3000, max_tokens=2, sparse_prefill=False)
    b.submit("sparse", prompt=3000, max_tokens=2)
    plans = [plan for plan in _plans(b) if plan.prefill or plan.score]
    begun = [bool(plan.score) for plan in plans[:8]]
    assert begun == [False, True] * 4


def test_the_look_ahead_is_planned_in_units_of_its_own() -> None:
    b = bench(lookahead=1)
    b.runner.cost = lambda units, decoding: (0.01 * units + 0.001, 0.001 * bool(decoding))
    b.submit("a", prompt=LONG, max_tokens=4)
    chunks = [chunk for plan in _plans(b) for chunk in plan.score]
    ends = [chunk.start + chunk.count for chunk in chunks]
    assert LONG - 1 in ends
    assert ends[-1] == LONG - 1 + LOOK_AHEAD_UNITS
    assert len([end for end in ends if end > LONG - 1]) > 1
    assert b.statistics().spec_prefill.scoring_s > 1.0
    assert b.statistics().prefill_s < b.statistics().spec_prefill.scoring_s


def test_look_aheads_of_several_prompts_share_a_step() -> None:
    b = bench(scorer={"rows": 4}, max_running=4, prefill_tokens=5000)
    b.runner.cost = lambda units, decoding: (1e-6 * units + 0.001, 0.001 * bool(decoding))
    for i in range(4):
        b.submit(f"{i}", prompt=700, max_tokens=4)
    together = [len(plan.score) for plan in _plans(b) if any(c.start >= 699 for c in plan.score)]
    assert max(together) > 1


def test_decoding_sequences_keep_their_rate_while_prompts_are_scored() -> None:
    """As beside prompts that are prefilled: three quarters of it, within what one step shows."""
    b = bench(prefill_tokens=512, max_running=6, lookahead=1, scorer={"min_tokens": 1000})
    b.runner.cost = lambda units, decoding: (1e-4 * units + 0.0002 * bool(units), 0.01 * bool(decoding))
    for i in range(4):
        b.submit(f"{i}", prompt=8, max_tokens=4000)
    b.until(lambda: all(len(b.heard[f"{i}"].tokens) > 40 for i in range(4)))
    b.submit("long", prompt=4000, max_tokens=2)
    began, steps, longest = b.now, 0, 0.0
    while b.heard["long"].finish is None:
        before, _ = b.now, b.step()
        longest = max(longest, b.now - before)
        steps += 1
    assert steps * 0.01 / (b.now - began) > 0.7
    assert longest < 0.03


def test_steps_of_a_scorer_may_be_longer_than_those_of_the_model() -> None:
    """It is small, and its products fill a device with more tokens. What its chunks cost may be measured before."""
    known = tuple(StepCost(0, tokens, 0.002 + 2e-5 * tokens) for tokens in (64, 256, 1024))
    can = {"prefill_tokens": 700, "chunks": known}
    b = bench(scorer=can, prefill_tokens=200)
    b.runner.cost = lambda units, decoding: (2e-5 * units + 0.002, 0.001 * bool(decoding))
    b.submit("a", prompt=LONG, max_tokens=4)
    plans = _plans(b)
    assert [chunk.count for plan in plans for chunk in plan.score if chunk.start < LONG - 1] == [700, LONG - 1 - 700]
    assert max(chunk.count for plan in plans for chunk in plan.prefill) <= 200


def test_a_look_ahead_costs_credit_like_tokens() -> None:
    can = SpecPrefill(CAN, Outputs()).limits(512)
    budget = PrefillBudget(512, others=can)
    charge = budget.charge(1, decoding=0, work=Work.LOOK_AHEAD)
    budget.observe(charge, prefill_s=0.01, decode_s=0.0)
    assert budget.split_scoring(Work.LOOK_AHEAD, [12, 12], decoding=0) == [2, 0]


# Troubles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_cancel_at_any_step_leaves_nothing(lookahead: int) -> None:
    for steps in range(40):
        b = bench(lookahead=lookahead, block=16, blocks=100)
        b.submit("a", prompt=LONG, max_tokens=5)
        other = b.submit("b", prompt=LONG, max_tokens=5)
        for _ in range(steps):
            if b.scheduler.has_work:
                b.step()
        b.cancel("a", CancelReason.CLIENT)
        b.run()
        b.assert_undisturbed(other, KEEP)
        b.assert_idle()


def test_a_step_of_scoring_that_raises_is_found_and_others_go_on() -> None:
    b = bench(lookahead=1)
    b.runner.raises = lambda plan: any(chunk.id == "bad" for chunk in plan.score)
    good = b.submit("good", prompt=LONG, max_tokens=5)
    b.submit("bad", prompt=LONG, max_tokens=5)
    b.run()
    b.assert_undisturbed(good, KEEP)
    finish = b.heard["bad"].finish
    assert finish is not None
    assert finish.code == "engine_step_failed"
    b.assert_idle()


def test_a_result_for_a_sequence_that_has_ended_is_dropped() -> None:
    b = bench(lookahead=1)
    b.submit("a", prompt=LONG, max_tokens=5)
    b.until(lambda: any(chunk.start >= LONG - 1 for chunk in b.plan.score))
    plan = b.scheduler.oldest_plan
    b.cancel("a")
    b.hear(b.scheduler.apply(plan, StepResult(kept=(RowKept("a", failure="late"),))))
    assert not b.statistics().spec_prefill.failed


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(60))
def test_random_lives(seed: int) -> None:
    """Prompts of all kinds in all kinds of memory: each that was not disturbed gets what it would have got alone."""
    chance = random.Random(seed)
    cache = chance.random() < 0.5
    keep = 1.0 if cache else chance.choice((0.3, 0.6, 1.0))
    block = chance.choice((4, 16))
    rows = chance.choice((1, 3))
    b = bench(
        keep,
        scorer={"min_tokens": 400, "rows": rows, "block": 16, "blocks": chance.choice((0, 100))},
        max_running=chance.choice((1, 3, 5)),
        prefill_tokens=chance.choice((40, 200, 2000)),
        lookahead=chance.choice((0, 1)),
        block=block,
        blocks=chance.choice((0, 1300, 1800)) // block,
        cache=cache,
        share=chance.random() < 0.5,
        drafts=chance.choice((0, 0, 3)),
    )
    b.runner.cost = lambda units, decoding: (chance.uniform(1, 2) * 0.0001 * units, 0.003 * bool(decoding))
    requests: dict[str, Submit] = {}
    cancelled: set[str] = set()
    for number in range(30):
        id_ = f"{number}"
        length = chance.choice((1, 30, 399, 400, 450, 900))
        trunk = tuple(range(chance.choice((0, 100, 500))))
        requests[id_] = b.submit(
            id_,
            prompt=(*trunk, *chance.choices(range(900), k=length)),
            max_tokens=chance.choice((1, 5, 60)),
            sparse_prefill=chance.choice((None, None, True, False)),
        )
        if chance.random() < 0.2:
            b.runner.scorer.fails.add(id_)
        if chance.random() < 0.1:
            b.runner.scorer.evicts.add(id_)
        for _ in range(chance.choice((0, 1, 12))):
            b.step()
        if chance.random() < 0.3:
            gone = f"{chance.randrange(number + 1)}"
            b.cancel(gone)
            cancelled.add(gone)
    b.run()
    too_big = {id_ for id_, heard in b.heard.items() if heard.finish and heard.finish.code == "context_length_exceeded"}
    for id_ in requests.keys() - cancelled - too_big:
        whole = not b.heard[id_].kept or b.heard[id_].kept[-1] == (0, 0)
        b.assert_undisturbed(requests[id_], 1.0 if whole else keep)
    b.runner.scorer.evicts.clear()
    b.assert_idle()
