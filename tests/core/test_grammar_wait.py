"""Sequences that wait for their grammars: others pass them, and each of them ends."""

from __future__ import annotations

import pytest

from tests.core.drive import Bench
from treadle.core import block_budget
from treadle.core.grammar_state import READY, GrammarState
from treadle.core.messages import CancelReason, Constraint, Finish, FinishReason, Output, Submit, WaitReason
from treadle.core.plan import StepPlan
from treadle.core.scheduler import Scheduler, SchedulerLimits
from treadle.core.statistics import RunnerStatistics

GRAMMAR, SLOT = WaitReason.GRAMMAR, WaitReason.SLOT


def constraint(grammar: str = "start: /a/") -> Constraint:
    return Constraint(kind="regex", grammar=grammar)


def constrained(bench: Bench, id_: str, grammar: str = "start: /a/", **options: object) -> Submit:
    return bench.submit(id_, constraint=constraint(grammar), **options)  # type: ignore[arg-type]


def invalid(message: str) -> Finish:
    return Finish(reason=FinishReason.ERROR, code="invalid_grammar", message=message)


def outputs_of(outputs: tuple[Output, ...], id_: str) -> list[Output]:
    return [output for output in outputs if output.id == id_]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sequence_is_admitted_when_its_grammar_is_compiled(lookahead: int) -> None:
    bench = Bench(lookahead=lookahead, cache=True)
    request = constrained(bench, "a")
    for _ in range(3):
        bench.step()
    assert bench.plan.idle
    assert bench.heard["a"].waits_for == [GRAMMAR], "the reason is reported once"
    bench.runner.compile("start: /a/")
    bench.step()
    assert [admit.request.id for admit in bench.plan.admit] == ["a"]
    assert bench.heard["a"].wait_s == pytest.approx(0.03)
    bench.run()
    bench.assert_undisturbed(request)
    assert bench.heard["a"].waits_for == [GRAMMAR, SLOT]
    bench.assert_idle()


def test_a_compiled_grammar_costs_no_step_and_no_report() -> None:
    bench = Bench()
    bench.runner.grammars["start: /a/"] = READY
    constrained(bench, "a")
    bench.step()
    assert bench.heard["a"].admitted == 1
    assert bench.heard["a"].waits_for == []


def test_others_pass_it_also_those_of_its_tenant_that_came_later() -> None:
    bench = Bench(max_running=1)
    constrained(bench, "a")
    later = [bench.submit(id_, max_tokens=3) for id_ in ("b", "c")]
    bench.run()
    for request in later:
        bench.assert_undisturbed(request)
    assert bench.heard["a"].admitted == 0


def test_it_takes_its_place_by_arrival_once_it_is_compiled() -> None:
    bench = Bench(max_running=1)
    bench.submit("runs", max_tokens=20)
    constrained(bench, "a")
    bench.submit("b")
    bench.step()
    bench.runner.compile("start: /a/")
    bench.until(lambda: bench.heard["runs"].finish is not None)
    bench.step()
    assert [admit.request.id for admit in bench.plan.admit] == ["a"], "it came before b"


def test_a_grammar_that_fails_ends_the_sequence_before_its_admission() -> None:
    bench = Bench()
    constrained(bench, "a", grammar="nonsense")
    other = bench.submit("b")
    bench.step()
    bench.runner.compile("nonsense", "line 1: nonsense")
    bench.run()
    assert bench.heard["a"].finish == invalid("line 1: nonsense")
    assert bench.heard["a"].admitted == 0
    bench.assert_undisturbed(other)
    bench.assert_idle()
    assert bench.statistics().failed == 1


def test_without_a_lookup_every_grammar_fails() -> None:
    scheduler = Scheduler(SchedulerLimits(1, 8))
    scheduler.submit(Submit(id="a", prompt=(1,), max_tokens=1, constraint=constraint(), max_wait_s=9.0), 0.0)
    plan = scheduler.plan(0.0)
    (output,) = scheduler.flush()
    assert plan.idle
    assert output.finish is not None
    assert output.finish.code == "invalid_grammar"
    assert "structured output is off" in output.finish.message


def test_its_wait_ends_in_time() -> None:
    bench = Bench()
    constrained(bench, "a", max_wait_s=1.0)
    constrained(bench, "b", max_wait_s=2.0)
    bench.step()
    assert bench.scheduler.next_expiry == 1.0
    bench.now = 0.99
    bench.step()
    assert bench.heard["a"].finish is None
    bench.now = 1.0
    bench.step()
    assert bench.heard["a"].finish == Finish(reason=FinishReason.EXPIRED, code="text_generation_busy")
    assert bench.scheduler.next_expiry == 2.0
    bench.runner.compile("start: /a/")
    bench.step()
    assert bench.heard["b"].admitted == 1
    assert bench.scheduler.next_expiry is None
    bench.run()
    bench.assert_idle()


def test_it_is_cancelled_at_once() -> None:
    bench = Bench()
    constrained(bench, "a")
    bench.step()
    bench.cancel("a", CancelReason.CLIENT)
    bench.step()
    assert bench.heard["a"].finish == Finish(reason=FinishReason.CANCELLED, code="client")
    bench.assert_idle()
    bench.runner.compile("start: /a/")
    bench.step()
    bench.assert_idle()


def test_one_that_is_cancelled_before_its_grammar_was_asked_for_leaves_no_work() -> None:
    bench = Bench()
    constrained(bench, "a")
    bench.cancel("a")
    assert not bench.scheduler.has_work
    constrained(bench, "b")
    assert bench.scheduler.has_work


def test_all_are_ended_by_a_shutdown() -> None:
    bench = Bench()
    constrained(bench, "a")
    bench.step()
    bench.hear(bench.scheduler.end_all(Finish(reason=FinishReason.ERROR, code="server_stopping")))
    assert bench.heard["a"].finish is not None
    bench.assert_idle()


def test_it_is_no_work_once_its_grammar_was_asked_for() -> None:
    """Else the loop would turn without a rest."""
    bench = Bench()
    constrained(bench, "a")
    assert bench.scheduler.has_work, "its grammar must be asked for"
    bench.step()
    assert not bench.scheduler.has_work
    assert bench.scheduler.live == 1
    assert bench.statistics().waiting == bench.statistics().awaiting_grammar == 1
    bench.submit("b")
    assert bench.scheduler.has_work


def test_the_sequences_of_a_group_wait_together_and_do_not_expire_once_one_runs() -> None:
    bench = Bench(max_running=2)
    for i in range(2):
        constrained(bench, f"slow {i}", grammar="slow", group="g", max_wait_s=1.0)
    quick = constrained(bench, "quick", grammar="quick", group="g", max_wait_s=1.0)
    bench.step()
    bench.runner.compile("quick")
    bench.step()
    assert bench.heard["quick"].admitted == 1
    bench.now = 5.0
    bench.run()
    bench.assert_undisturbed(quick)
    assert bench.heard["slow 0"].finish is bench.heard["slow 1"].finish is None
    assert bench.scheduler.next_expiry is None, "of a group that has started none expires"
    bench.runner.compile("slow")
    bench.step()
    assert len(bench.plan.admit) == 2
    bench.run()
    bench.assert_idle()


def test_a_replayed_one_waits_for_its_grammar_without_limit() -> None:
    """The next engine has compiled nothing yet."""
    bench = Bench(max_running=1)
    whole = bench.submit("whole", prompt=(1, 2, 3), max_tokens=8)
    bench.run()
    tokens = tuple(bench.heard["whole"].tokens)
    bench.submit(
        "a",
        prompt=whole.prompt,
        max_tokens=8,
        constraint=constraint(),
        generated=tokens[:3],
        resumed=True,
        max_wait_s=0.0,
    )
    first = bench.submit("b", max_tokens=30)
    bench.step()
    bench.now = 100.0
    bench.step()
    assert bench.heard["a"].finish is None
    assert bench.heard["b"].admitted == 1
    waits = bench.submit("c")
    bench.runner.compile("start: /a/")
    bench.run()
    assert tuple(bench.heard["a"].tokens) == tokens[3:]
    bench.assert_undisturbed(first)
    bench.assert_undisturbed(waits)
    order = sorted(("a", "b", "c"), key=lambda id_: bench.heard[id_].first_token or 0.0)
    assert order == ["b", "a", "c"], "it goes before those that never ran"


def test_a_preempted_one_asks_again_and_goes_on_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)
    bench = Bench(block=4, blocks=8)
    bench.runner.grammars["start: /a/"] = READY
    first, second = (constrained(bench, name, prompt=4, max_tokens=24) for name in ("first", "second"))
    bench.until(lambda: bench.statistics().preempted == 1)
    del bench.runner.grammars["start: /a/"]
    bench.until(lambda: bench.heard["first"].finish is not None)
    assert bench.runner.asked.count("start: /a/") > 2
    assert not bench.runner.rows or bench.scheduler.has_work
    bench.run()
    assert bench.heard["second"].finish is None
    bench.runner.compile("start: /a/")
    bench.step()
    bench.run()
    for request in (first, second):
        bench.assert_undisturbed(request)
    assert bench.heard["second"].admitted == 1
    bench.assert_idle()


def test_a_preempted_one_is_work_until_its_grammar_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may end in the step of its preemption: nobody would ask afterwards."""
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)
    bench = Bench(block=4, blocks=8)
    bench.runner.grammars["start: /a/"] = READY
    bench.submit("first", prompt=4, max_tokens=24)
    constrained(bench, "second", prompt=4, max_tokens=24)
    bench.until(lambda: bench.statistics().preempted == 1)
    bench.cancel("first")
    bench.step()
    bench.run()
    assert bench.heard["second"].finish is not None
    bench.assert_idle()


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_one_whose_compiled_grammar_was_dropped_waits_for_it_again(lookahead: int) -> None:
    """The cache of grammars is bounded, and a slot may come long after the grammar was compiled."""
    bench = Bench(max_running=1, lookahead=lookahead, cache=True)
    other = bench.submit("b", max_tokens=9)
    request = constrained(bench, "a")
    bench.step()
    bench.runner.compile("start: /a/")
    bench.step()
    assert bench.heard["a"].waits_for == [GRAMMAR, SLOT]
    del bench.runner.grammars["start: /a/"]
    bench.until(lambda: bench.heard["a"].admitted == 1)
    bench.run()
    assert bench.runner.grammars["start: /a/"] is not READY
    assert not bench.runner.rows
    bench.runner.compile("start: /a/")
    bench.step()
    bench.run()
    bench.assert_undisturbed(other)
    bench.assert_undisturbed(request)
    bench.assert_idle()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_suspect_is_recomputed_and_the_faulty_one_found(lookahead: int) -> None:
    bench = Bench(lookahead=lookahead)
    bench.runner.grammars["start: /a/"] = READY
    requests = {id_: constrained(bench, id_, max_tokens=6) for id_ in ("good", "bad", "fine")}

    def raises(plan: StepPlan) -> bool:
        return "bad" in plan.sequence_ids and bench.now > 0.02

    bench.runner.raises = raises
    bench.step()
    waits = constrained(bench, "waits", grammar="other")
    bench.run()
    bench.runner.compile("other")
    bench.step()
    bench.run()
    finish = bench.heard["bad"].finish
    assert finish is not None
    assert finish.code == "engine_step_failed"
    for request in (requests["good"], requests["fine"], waits):
        bench.assert_undisturbed(request)
    bench.assert_idle()


def test_the_table_names_those_whose_grammars_are_compiled() -> None:
    """The compiler may end the process: then they are the suspects."""
    bench = Bench(max_running=1)
    bench.submit("runs", max_tokens=9, arrival=5)
    bench.step()
    bench.submit("waits", arrival=6)
    constrained(bench, "compiles", arrival=7)
    assert sorted(bench.scheduler.exposed_arrivals) == [5, 7]
    bench.step()
    assert sorted(bench.scheduler.exposed_arrivals) == [5, 7]
    bench.runner.compile("start: /a/")
    bench.step()
    assert sorted(bench.scheduler.exposed_arrivals) == [5]


def test_statistics_count_it_among_the_waiting() -> None:
    bench = Bench(max_running=1)
    bench.submit("runs", max_tokens=9)
    bench.submit("waits")
    constrained(bench, "compiles")
    bench.step()
    now = bench.scheduler.statistics(2.0, RunnerStatistics())
    assert (now.running, now.waiting, now.awaiting_grammar, now.oldest_wait_s) == (1, 2, 1, 2.0)


def test_states_are_asked_for_in_every_plan_until_they_are_known() -> None:
    bench = Bench()
    constrained(bench, "a")
    for _ in range(3):
        bench.step()
    bench.runner.compile("start: /a/")
    for _ in range(2):
        bench.step()
    assert bench.runner.asked == ["start: /a/"] * 4
    assert bench.runner.grammars["start: /a/"].state is GrammarState.READY
