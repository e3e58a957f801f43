"""Speculative decoding of the scheduler: never slower than without, and what it is learned from (F3, P11)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.core.drafting import MOST, Engine, Machine
from tests.core.drive import Bench
from treadle.core.acceptance import FIRST, FIRST_MATCHED, Acceptance, MatchedAcceptance
from treadle.core.capabilities import StepCost
from treadle.core.draft_budget import NO_ROOM, NOTHING_MEASURED, NOTHING_READY, DraftBudget
from treadle.core.messages import Submit
from treadle.core.plan import MAX_SCORED_TOKENS, DecodeRow, DraftTrial, Encode, RowTokens, StepPlan, StepResult
from treadle.core.scheduler import Scheduler, SchedulerLimits
from treadle.core.sequence import Sequence
from treadle.core.speculation import Speculation
from treadle.core.statistics import RunnerStatistics, SpeculationStatistics
from treadle.core.verify_costs import VerifyCosts

MEMORY_BOUND = Machine(0.002, lambda rows, tokens: 0.010 + 0.0001 * max(0, tokens - 32))
COMPUTE_BOUND = Machine(0.0002, lambda rows, tokens: 0.002 + 0.002 * tokens)
HOST_BOUND = Machine(0.003, lambda rows, tokens: 0.001 + 0.00002 * tokens)
UNPREPARED = Machine(0.004, lambda rows, tokens: 0.006 + 0.000002 * tokens)  # of an H100 that serves 8B parameters
MACHINES = {"memory": MEMORY_BOUND, "compute": COMPUTE_BOUND, "host": HOST_BOUND}


def ratio(machine: Machine, rows: int, chance: float, *, wrong: float = 1.0, steps: int = 400) -> float:
    """Tokens per second over those without drafts."""
    drafting = Engine(machine, rows, lambda _: chance, machine.budget(wrong))
    return drafting.run(steps) / plain_rate(machine, rows, steps)


@cache
def plain_rate(machine: Machine, rows: int, steps: int) -> float:
    """Tokens per second without drafts."""
    return Engine(machine, rows, lambda _: 0.0, None, most=0).run(steps)


@pytest.mark.untraced
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("rows", "steps"), [(1, 400), (4, 400), (32, 200), (128, 170)])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 1.0])
def test_no_acceptance_and_no_batch_is_slower_than_plain_decoding(
    name: str, rows: int, steps: int, chance: float
) -> None:
    assert ratio(MACHINES[name], rows, chance, steps=steps) >= 0.98


@pytest.mark.untraced
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("told", [0, 3])
def test_drafts_that_are_gone_when_they_could_be_verified_cost_no_more(
    name: str, rows: int, chance: float, told: int
) -> None:
    """Nothing was prepared meanwhile, so to wait for them in vain is not free."""
    machine = MACHINES[name]
    drafting = Engine(machine, rows, lambda _: chance, machine.budget(), told=told, match=4, forgets=True)
    assert drafting.run(400) / plain_rate(machine, rows, 400) >= 0.98


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_to_look_for_drafts_takes_a_small_part_of_the_time(rows: int) -> None:
    machine = replace(HOST_BOUND, look_s=0.000005)
    drafting = Engine(machine, rows, lambda _: 0.0, machine.budget(), told=3)
    plain = Engine(machine, rows, lambda _: 0.0, None, most=0)
    assert drafting.run(400) / plain.run(400) >= 0.98
    looking = [plan.propose for plan in drafting.plans[100:]]
    assert any(looking)
    assert rows == 1 or not all(looking)


@pytest.mark.untraced
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("chance", [0.6, 0.9, 1.0])
def test_few_sequences_gain_where_tokens_are_nearly_free(rows: int, chance: float) -> None:
    assert ratio(MEMORY_BOUND, rows, chance) >= 1.6


@pytest.mark.untraced
@pytest.mark.parametrize("wrong", [0.3, 3.0])
def test_wrong_costs_are_corrected_by_the_server_s_own_steps(wrong: float) -> None:
    assert ratio(MEMORY_BOUND, 4, 0.7, wrong=wrong, steps=3000) >= 1.4
    assert ratio(COMPUTE_BOUND, 8, 0.3, wrong=wrong, steps=2000) >= 0.98


@pytest.mark.untraced
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_machine_that_was_busy_in_the_warm_up_verifies_nothing_that_does_not_pay(name: str, rows: int) -> None:
    """All costs were measured three times too high; verifying steps are no reason to think plain ones slow."""
    machine = MACHINES[name]
    busy = Machine(3 * machine.host_s, lambda rows, tokens: 3 * machine.device(rows, tokens))
    drafting = Engine(machine, rows, lambda _: 0.0, busy.budget())
    plain = Engine(machine, rows, lambda _: 0.0, None, most=0)
    assert drafting.run(400) / plain.run(400) >= 0.97


@pytest.mark.parametrize("measured", [((1, 1, 0.012), (1, 2, 0.024)), ((1, 1, 0.012), (1, 2, 9.0))])
def test_a_warm_up_that_says_drafts_never_pay_is_put_to_the_test_once(
    measured: tuple[tuple[int, int, float], ...],
) -> None:
    """A busy machine may have said so; and no step takes longer than as many smaller ones."""
    costs = VerifyCosts([StepCost(1, 1, 0.010)], [StepCost(*one) for one in measured])
    assert costs.verifying_s(1, 1) == 0.024
    budget = DraftBudget(costs, MOST)
    assert not budget.could_gain(1)
    drafting = Engine(MEMORY_BOUND, 1, lambda _: 1.0, budget)
    assert drafting.run(300) / plain_rate(MEMORY_BOUND, 1, 300) >= 1.6


def test_the_reason_why_nothing_is_verified_stays_when_nothing_runs() -> None:
    budget = COMPUTE_BOUND.budget()
    drafting = Engine(COMPUTE_BOUND, 1, lambda _: 0.0, budget, told=3)
    drafting.run(50)
    reason = budget.reason
    assert reason not in ("", NOTHING_READY)
    assert budget.choose([], in_flight=False) == {}
    assert budget.reason == reason


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("machine", "rows", "chance"),
    [
        *((machine, rows, 0.0) for machine in MACHINES.values() for rows in (1, 4, 32)),
        *((UNPREPARED, rows, chance) for rows in (1, 2, 8, 32, 128) for chance in (0.0, 0.3)),
    ],
)
def test_a_server_that_knows_nothing_learns_for_a_fiftieth_of_its_first_tokens(
    machine: Machine, rows: int, chance: float
) -> None:
    """Also where a step that verifies takes long because nothing is prepared meanwhile, and the step behind it waits
    as long again."""
    drafting = Engine(machine, rows, lambda _: chance, machine.budget())
    assert drafting.gain(128) / Engine(machine, rows, lambda _: chance, None, most=0).gain(128) >= 0.98


def test_a_server_whose_verifying_steps_take_long_finds_out_that_they_pay() -> None:
    plain = Engine(UNPREPARED, 4, lambda _: 0.6, None, most=0)
    drafting = Engine(UNPREPARED, 4, lambda _: 0.6, UNPREPARED.budget())
    assert drafting.gain(1000) / plain.gain(1000) >= 1.25


def test_a_server_that_knows_nothing_verifies_few_drafts_first() -> None:
    free = Machine(0.002, lambda rows, tokens: 0.010)
    engine = Engine(free, 32, lambda _: 0.0, free.budget())
    engine.run(40)
    first = next(plan for plan in engine.plans if plan.verifies)
    assert sum(row.drafts for row in first.decode) <= MOST


def test_trials_take_a_two_hundredth_of_the_time_with_the_steps_behind_them() -> None:
    """Those of a server that knows nothing are an advance on it."""
    engine = Engine(UNPREPARED, 1, lambda _: 0.0, UNPREPARED.budget())
    plain = Engine(UNPREPARED, 1, lambda _: 0.0, None, most=0)
    engine.gain(128)
    assert not any(plan.verifies for plan in engine.plans[20:])
    assert 0.994 <= engine.gain(2000) / plain.gain(2000) < 0.999


def test_a_run_that_gains_is_not_ended_for_a_trial_of_plain_steps_at_its_beginning() -> None:
    """Plain steps were measured just before. Later ones are measured for a two hundredth of the time."""
    engine = Engine(UNPREPARED, 1, lambda _: 0.6, UNPREPARED.budget())
    engine.run(60)
    verifies = [plan.verifies for plan in engine.plans if plan.decode]
    assert all(verifies[verifies.index(True) :])
    engine = Engine(UNPREPARED, 1, lambda _: 1.0, UNPREPARED.budget())
    engine.run(2000)
    plain = sum(not plan.verifies for plan in engine.plans[60:])
    assert 4 <= plain < 0.02 * 2000


@pytest.mark.untraced
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("match", [0, 20, 40])
def test_drafts_that_no_step_can_verify_are_like_wrong_ones(rows: int, match: int) -> None:
    """Where a grammar allows none of them: steps in lock-step for nothing had two thirds of the rate, for good."""
    budget = UNPREPARED.budget()
    if not match:
        Engine(UNPREPARED, rows, lambda _: 0.8, budget).run(300)  # others had chances
    refusing = Engine(UNPREPARED, rows, lambda _: 0.5, budget, match=match, refuses=True)
    assert refusing.run(3000) / plain_rate(UNPREPARED, rows, 400) > 0.98


def test_what_a_step_could_not_verify_lowers_its_chances() -> None:
    engine = Engine(UNPREPARED, 1, lambda _: 0.5, UNPREPARED.budget(), match=40, refuses=True)
    engine.run(30)
    assert engine.budget.usual.of(40).chance(0) < 0.7 < FIRST_MATCHED[-1]
    assert engine.scheduler.statistics(engine.now, RunnerStatistics()).speculation.drafted == 0


def test_more_sequences_than_a_step_samples_have_no_drafts() -> None:
    engine = Engine(MEMORY_BOUND, MAX_SCORED_TOKENS + 1, lambda _: 0.85, MEMORY_BOUND.budget())
    engine.run(30)
    assert engine.budget.reason == NO_ROOM
    assert not any(plan.verifies for plan in engine.plans[-10:])


@pytest.mark.untraced
@pytest.mark.parametrize("times", [1, 30])
def test_slow_steps_at_the_beginning_do_not_end_drafts_for_good(times: int) -> None:
    """As where kernels were compiled: what looks as if nothing could be gained is tried again, if rarely, however long
    a trial takes."""
    machine = Machine(0.002 * times, lambda rows, tokens: times * max(0.010, 0.00004 * tokens))
    engine = Engine(machine, 64, lambda _: 0.9, machine.budget(), slow_s=[0.3 * times] * 2)
    engine.run(20)
    assert not engine.budget.could_gain(64)
    for _ in range(12):
        engine.run(1000)
        if (verified := sum(plan.verifies for plan in engine.plans[-200:])) > 150:
            break
    assert verified > 150


@pytest.mark.untraced
@pytest.mark.parametrize("rows", [200, 300, 520])
def test_a_step_of_many_sequences_verifies_what_there_is_room_for(rows: int) -> None:
    machine = Machine(0.003, lambda rows, tokens: 0.020 + 0.000006 * tokens)
    engine = Engine(machine, rows, lambda _: 0.85, machine.budget())
    rate = engine.run(300)
    most = max(sum(row.drafts for row in plan.decode) for plan in engine.plans)
    assert most == max(0, MAX_SCORED_TOKENS - rows)
    assert rate / plain_rate(machine, rows, 100) > (1.05 if most else 0.98)
    assert (engine.budget.reason == NO_ROOM) == (not most)


@pytest.mark.parametrize("times", [1, 1000])
def test_credit_is_limited_and_pays_for_any_trial(times: int) -> None:
    machine = Machine(0.002 * times, lambda rows, tokens: times * 0.010)
    budget = machine.budget()
    for _ in range(100_000 if times == 1 else 10_000):
        budget.observe_plain(4, machine.plain_s(4))
    assert budget._credit_s == max(1.0, 2 * budget._doubtful_s(4))
    assert budget._may_gain(4)


def test_what_runs_have_lost_is_forgiven_at_some_point() -> None:
    """Or nothing would be tried for as long as a server has run."""
    budget = MEMORY_BOUND.budget()
    for _ in range(1000):
        budget._run.lost_s = 1.0
        budget._end_run(1)
    steps = 0
    while budget._credit_s < 0:
        budget.observe_plain(1, budget.costs.plain_s(1))
        steps += 1
    assert 1000 < steps < 10_000


def test_a_host_that_is_held_up_once_while_it_looks_for_drafts_goes_on_looking() -> None:
    speculation = Speculation(MEMORY_BOUND.budget(), lookahead=1, resolved=False)
    rows = DecodeRow("a", 0), DecodeRow("b", 0)
    one, two = StepPlan(1, decode=rows[:1], propose=True), StepPlan(2, decode=rows, propose=True)
    for seconds in (10.0, 1e-6, 1e-6, 10.0, 1e-6):
        speculation.looked(one, seconds)
        assert not speculation._pause
    for _ in range(11):
        assert not speculation._pause, "a server that knows nothing goes on"
        speculation.looked(one, 1.0)
    speculation.looked(two, 2.0)
    assert speculation._pause > 1000, "looking takes as long as that"


def test_a_draft_that_ends_an_answer_is_an_accepted_one() -> None:
    """Though it gains no token more than a plain step: none is sampled behind it."""
    scheduler = Scheduler(SchedulerLimits(1, 512, draft_tokens=3))
    scheduler.submit(Submit(id="a", prompt=(1, 2, 3), max_tokens=100, stop_token_ids=(9,)), 0.0)
    for tokens, ends in (((5,), False), ((6, 7, 8, 4), False), ((6, 9), True)):
        plan = scheduler.plan(0.0)
        (decode,) = plan.decode
        gained = RowTokens("a", tokens, drafted=decode.drafts, ends_drafted=ends)
        output = scheduler.apply(plan, StepResult(rows=(gained,)))[-1]
    assert (output.tokens, output.drafted, output.accepted) == ((6, 9), 3, 2)
    assert output.finish is not None
    found = scheduler.statistics(0.0, RunnerStatistics()).speculation
    assert found.reason == NOTHING_MEASURED


def test_no_draft_is_asked_for_that_could_not_count() -> None:
    """Behind the last token but one of an answer there is none."""
    seq = Sequence.of(Submit("a", (1, 2), 3), order=0, now=0.0)
    seq.ready = 8
    budget = MEMORY_BOUND.budget()
    assert len(budget._chances(seq, in_flight=False)) == 2
    seq.tokens.append(5)
    assert len(budget._chances(seq, in_flight=False)) == 1
    seq.tokens.append(5)
    assert budget._chances(seq, in_flight=False) == []


def test_steps_that_encode_images_teach_nothing_of_decoding() -> None:
    speculation = Speculation(budget := MEMORY_BOUND.budget(), lookahead=True, resolved=False)
    before = budget.costs.plain_s(1)
    for step in range(20):
        plan = StepPlan(step, decode=(DecodeRow("a", step),), encode=(Encode("b", 0, step, 1),))
        speculation.planned(plan, float(step), follows=True)
    assert budget.costs.plain_s(1) == before


def test_drafts_that_are_computed_when_asked_for_need_not_follow_the_token_in_flight() -> None:
    """Those that were looked up must: the step in flight samples the first of them."""
    chosen = {}
    for match in (0, 4):
        budget = UNPREPARED.budget()
        seq = Sequence.of(Submit(id="a", prompt=(1,), max_tokens=99), order=0, now=0.0)
        seq.ready, seq.match, budget._plain_left, budget._owed_s = MOST, match, 0, 0.0  # and no credit
        for _ in range(9):
            budget.observe(seq, match, 1, 1)
            budget.observe(seq, match, 1, 0)
        chosen[match] = bool(budget.choose([seq], in_flight=True)), bool(budget.choose([seq], in_flight=False))
    assert chosen == {0: (True, True), 4: (False, True)}


def test_outcomes_that_plain_steps_show_for_free_need_no_trials() -> None:
    engine = Engine(MEMORY_BOUND, 4, lambda _: 0.0, MEMORY_BOUND.budget(), told=3)
    engine.run(30)
    engine.plans.clear()
    engine.budget._credit_s = -1e9
    engine.run(200)
    assert not any(decode.drafts for plan in engine.plans for decode in plan.decode)
    assert all(plan.propose for plan in engine.plans)


def test_the_chances_that_are_shown_follow_the_outcomes() -> None:
    speculation = Speculation(MEMORY_BOUND.budget(), lookahead=1, resolved=False)
    seq = Sequence.of(Submit(id="a", prompt=(1,), max_tokens=99), order=0, now=0.0)
    shown = [speculation.statistics(), speculation.statistics()]
    for match, drafted, accepted in ((0, 2, 2), (4, 3, 0)):
        speculation.tried(seq, match, drafted, accepted)
        shown.append(speculation.statistics())
    first, same, computed, matched = shown
    assert same == first
    assert computed.chances[0] > first.chances[0]
    assert computed.match_chances == first.match_chances
    assert dict(matched.match_chances)[4] < dict(first.match_chances)[4]


def test_drafts_are_taken_from_the_sequences_whose_drafts_are_right() -> None:
    """Where a draft costs as much as half a token, those of one in four pay."""
    machine = Machine(0.001, lambda rows, tokens: 0.004 + 0.0005 * tokens)
    engine = Engine(machine, 4, lambda id_: float(id_ == "2"), machine.budget(), told=4)
    engine.run(100)
    engine.plans.clear()
    engine.run(100)
    drafts = {id_: sum(row.drafts for plan in engine.plans for row in plan.decode if row.id == id_) for id_ in "0123"}
    assert drafts["2"] > 200
    assert max(drafts[id_] for id_ in "013") < 40


def test_nothing_is_in_flight_beside_a_step_that_verifies_drafts() -> None:
    engine = Engine(MEMORY_BOUND, 2, lambda _: 1.0, MEMORY_BOUND.budget())
    for _ in range(60):
        engine.step()
        verifying = [any(row.drafts for row in plan.decode) for plan, _ in engine.ends]
        assert verifying in ([], [False], [True])
    assert any(row.drafts for plan in engine.plans for row in plan.decode)


def test_a_step_that_computes_a_prompt_verifies_nothing() -> None:
    engine = Engine(MEMORY_BOUND, 2, lambda _: 1.0, MEMORY_BOUND.budget())
    engine.run(40)
    engine.scheduler.submit(Submit(id="long", prompt=tuple(range(2000)), max_tokens=4), engine.now)
    engine.plans.clear()
    while "long" in engine.scheduler._sequences:
        engine.step()
    chunks = [plan for plan in engine.plans if plan.prefill]
    assert len(chunks) > 2
    assert not any(row.drafts for plan in chunks for row in plan.decode)


def test_without_lookahead_plain_steps_are_timed_one_by_one() -> None:
    machine = Machine(0.001, lambda rows, tokens: 0.010)
    engine = Engine(machine, 1, lambda _: 0.0, machine.budget(), ready=0, lookahead=0)
    engine.run(200)
    assert engine.budget.costs.plain_s(1) == pytest.approx(0.011, rel=0.05)


def test_statistics_say_what_was_verified_and_why_nothing_is() -> None:
    engine = Engine(MEMORY_BOUND, 1, lambda _: 1.0, MEMORY_BOUND.budget())
    assert engine.scheduler.statistics(0.0, RunnerStatistics()).speculation.reason == NOTHING_READY
    engine.run(50)
    found = engine.scheduler.statistics(engine.now, RunnerStatistics()).speculation
    assert found.on
    assert found.reason == ""
    assert found.steps > 20
    assert found.rows in (found.steps, found.steps - 1)  # of one in flight nothing is known yet
    assert found.accepted == found.drafted > 8 * 20
    assert found.chances[0] > 0.9
    assert dict(found.match_chances) == {2: 0.1, 4: 0.2, 8: 0.4, 16: 0.7, 32: 0.95}
    engine = Engine(COMPUTE_BOUND, 4, lambda _: 0.0, COMPUTE_BOUND.budget())
    engine.run(50)
    found = engine.scheduler.statistics(engine.now, RunnerStatistics()).speculation
    assert not found.on
    assert "4 sequences would have" in found.reason
    hopeless = Machine(0.0001, lambda rows, tokens: 0.001 * tokens**2)
    engine = Engine(hopeless, 4, lambda _: 1.0, hopeless.budget())
    engine.run(50)
    found = engine.scheduler.statistics(engine.now, RunnerStatistics()).speculation
    assert found.reason == "4 sequences would gain nothing, whatever is accepted"
    none = Scheduler(SchedulerLimits(1, 512)).statistics(0.0, RunnerStatistics()).speculation
    assert none == SpeculationStatistics(reason="what drafts cost could not be measured in the warm-up")


def test_an_output_says_how_many_of_its_tokens_were_drafted() -> None:
    bench = Bench(drafts=3)
    bench.submit("a", max_tokens=9, stop_token_ids=(3,))
    plan = bench.scheduler.plan(0.0)
    (output,) = bench.scheduler.apply(plan, StepResult(rows=(RowTokens("a", (1, 2, 3), drafted=3),)))
    assert (output.drafted, output.accepted) == (3, 2)


def test_drafts_behind_the_end_of_a_sequence_were_not_rejected() -> None:
    bench = Bench(drafts=3, guarded=True)
    assert bench.budget is not None
    bench.budget._plain_left = 0
    bench.submit("a", max_tokens=9, stop_token_ids=(3,))
    plan = bench.scheduler.plan(0.0)
    bench.scheduler.apply(plan, StepResult(rows=(RowTokens("a", (1,), ready=3),)))
    plan = bench.scheduler.plan(0.0)
    assert plan.decode[0].drafts == 3
    bench.scheduler.apply(plan, StepResult(rows=(RowTokens("a", (2, 3), drafted=3),)))
    assert bench.budget.usual.of(0).chance(0) == pytest.approx((1 + FIRST) / 2)
    assert bench.budget.usual.of(0)._hits == [1.0], "of the second one nothing is known"


def test_trials_of_sequences_that_have_gone_teach_nothing() -> None:
    bench = Bench(drafts=3, guarded=True)
    bench.submit("a", max_tokens=9)
    plan = bench.scheduler.plan(0.0)
    bench.cancel("a")
    trials = (DraftTrial("a", 3, 3), DraftTrial("b", 3, 3))
    bench.scheduler.apply(plan, StepResult(rows=(RowTokens("a", (1,)),), trials=trials))
    assert bench.budget is not None
    assert bench.budget.usual.of(0).chance(0) == FIRST


# What is learned -----------------------------------------------------------------------------------------------------


def test_chances_come_from_others_first_and_then_from_the_sequence_s_own_drafts() -> None:
    usual = Acceptance()
    assert usual.reached(3) == pytest.approx([FIRST, FIRST**2, FIRST**3])
    own = Acceptance(usual)
    for _ in range(50):
        usual.observe(3, 1)
    last = usual.chance(1)
    assert own.reached(3) == pytest.approx([0.95, 0.95 * last, 0.95 * last**2], abs=0.01), (
        "a place is like the one before"
    )
    assert last < 0.1
    for _ in range(50):
        own.observe(2, 2)
    assert own.chance(0) > 0.98
    assert own.chance(1) > 0.9
    assert own.chance(2) == usual.chance(2)


def test_chances_of_looked_up_drafts_are_learned_by_the_length_of_the_match() -> None:
    usual = MatchedAcceptance()
    own = MatchedAcceptance(usual)
    assert [usual.of(match).chance(0) for match in (0, 3, 4, 7, 31, 32, 999)] == [
        *(FIRST, FIRST_MATCHED[1], FIRST_MATCHED[2], FIRST_MATCHED[2], FIRST_MATCHED[4]),
        *(FIRST_MATCHED[5], FIRST_MATCHED[5]),
    ]
    for _ in range(50):
        usual.of(3).observe(4, 0)
    assert own.of(2).chance(0) < 0.05
    assert own.of(32).reached(2) == pytest.approx([FIRST_MATCHED[5], FIRST_MATCHED[5] ** 2])


def test_long_matches_are_verified_at_once_and_short_ones_once_they_were_right_for_free() -> None:
    machine = MEMORY_BOUND
    for match, told, at_once in ((32, 0, True), (3, 0, False), (3, 4, True)):
        engine = Engine(machine, 2, lambda _: 1.0, machine.budget(), told=told, match=match)
        engine.budget._owed_s = 0.0  # without credit for a trial
        engine.run(12)
        assert any(plan.verifies for plan in engine.plans) == at_once


def test_costs_are_interpolated_by_drafts_and_rows_and_grow_beyond_the_largest() -> None:
    plain = [StepCost(1, 1, 1.0), StepCost(4, 4, 2.0)]
    verifying = [StepCost(1, 1, 2.0), StepCost(1, 5, 4.0), StepCost(3, 3, 4.0), StepCost(3, 9, 10.0)]
    costs = VerifyCosts(plain, verifying)
    assert [costs.plain_s(rows) for rows in (1, 2, 4, 7)] == pytest.approx([1.0, 4 / 3, 2.0, 3.0])
    assert [costs.verifying_s(1, drafts) for drafts in (0, 2, 4, 8)] == [2.0, 3.0, 4.0, 6.0]
    assert [costs.verifying_s(3, drafts) for drafts in (0, 6)] == [4.0, 10.0]
    assert costs.verifying_s(2, 4) == 6.0  # between 4 and 8
    assert costs.verifying_s(5, 0) == 6.0
    assert VerifyCosts(plain[:1], verifying[:1]).plain_s(9) == 1.0


def test_a_number_of_rows_that_was_measured_without_drafts_alone_tells_nothing_of_these() -> None:
    """As where the time of the warm-up was over: its drafts would cost nothing."""
    plain = [StepCost(1, 1, 1.0), StepCost(4, 4, 1.0), StepCost(16, 16, 1.0)]
    verifying = [StepCost(1, 1, 1.0), StepCost(1, 8, 2.0), StepCost(4, 4, 1.0), StepCost(4, 32, 5.0)]
    half = VerifyCosts(plain, [*verifying, StepCost(16, 16, 1.5)])
    assert half.verifying_s(16, 112) > 10.0
    assert VerifyCosts(plain, [StepCost(1, 1, 1.5)]).verifying_s(1, 8) == 1.5


def test_a_cost_is_at_most_that_of_a_larger_step() -> None:
    plain = [StepCost(1, 1, 2.0), StepCost(2, 2, 1.0)]
    measured = ((1, 2, 4.0), (1, 8, 5.0), (4, 4, 2.0), (4, 8, 3.0), (4, 16, 6.0))
    costs = VerifyCosts(plain, [StepCost(*one) for one in measured])
    assert [costs.plain_s(rows) for rows in (1, 5)] == [1.0, 1.0]
    found = [costs.verifying_s(rows, drafts) for rows, drafts in ((1, 1), (1, 7), (4, 0), (4, 4), (4, 12))]
    assert found == [2.0, 3.0, 2.0, 3.0, 6.0]


def test_costs_follow_the_server_and_an_outlier_moves_them_little() -> None:
    costs = VerifyCosts([StepCost(1, 1, 1.0)], [StepCost(1, 1, 1.0)])
    for _ in range(100):
        costs.observe_plain(1, 2.0)
    assert costs.plain_s(1) == pytest.approx(2.0, rel=0.01)
    costs.observe_plain(1, 1000.0)
    assert costs.plain_s(1) < 2.5


def test_steps_that_were_not_seen_for_long_are_expected_to_have_changed_like_others() -> None:
    costs = VerifyCosts([StepCost(1, 1, 1.0)], [StepCost(1, 1, 1.5)])
    for _ in range(50):
        costs.observe_plain(1, 2.0)
    assert costs.verifying_s(1, 5) == pytest.approx(3.0, rel=0.01), "the device or the host is slower now"
    for _ in range(3):
        costs.observe_verifying(1, 5, 6.0)
    plain_s = costs.plain_s(1)
    assert plain_s == pytest.approx(2.0, rel=0.1), "plain steps were seen a moment ago"
    assert costs.verifying_s(1, 5) > 4.0
    for _ in range(50):
        costs.observe_plain(1, 2.0)
    assert costs.plain_s(1) / costs.verifying_s(1, 5) == pytest.approx(costs.scale / 1.5)
