"""Tokens that a constraint forces: several a step, fed as a chunk, and what was in flight meanwhile is dropped."""

from __future__ import annotations

import random

import pytest

from tests.core.drive import Bench
from treadle.core import block_budget
from treadle.core.grammar_state import READY
from treadle.core.messages import CancelReason, Constraint, Finish, FinishReason, Submit
from treadle.core.plan import RowTokens
from treadle.core.prefill_budget import PrefillBudget
from treadle.core.sequence import Sequence


def forces_behind(count: int, length: int) -> object:
    """Force `count` tokens once a sequence has `length` tokens."""
    return lambda tokens: count if len(tokens) == length else 0


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("forced", [1, 2, 7])
def test_forced_tokens_come_with_the_token_before_them(lookahead: int, forced: int) -> None:
    bench = Bench(lookahead=lookahead)
    bench.runner.forces = forces_behind(forced, 4 + 2)  # type: ignore[assignment]
    request = bench.submit("a", prompt=4, max_tokens=20)
    gains = []
    while bench.scheduler.has_work:
        gains += [len(output.tokens) for output in bench.step() if output.tokens]
    bench.assert_undisturbed(request)
    assert gains == [1, 1 + forced, *[1] * (18 - forced)]
    bench.assert_idle()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_next_plan_feeds_them_as_a_chunk_and_a_decode_row(lookahead: int) -> None:
    """Behind the step in flight, which computes the token before them."""
    bench = Bench(lookahead=lookahead)
    bench.runner.forces = forces_behind(3, 4 + 2)  # type: ignore[assignment]
    bench.submit("a", prompt=4, max_tokens=20)
    bench.until(lambda: len(bench.heard["a"].tokens) == 5)
    bench.step()
    (chunk,) = bench.plan.prefill
    (decode,) = bench.plan.decode
    assert (chunk.start, chunk.count) == ((6, 2) if lookahead else (5, 3))
    assert decode.position == 5


@pytest.mark.parametrize("lookahead", [0, 1])
def test_steps_are_saved(lookahead: int) -> None:
    steps = []
    for forced in (0, 8):
        bench = Bench(lookahead=lookahead)
        bench.runner.forces = forces_behind(forced, 4 + 2)  # type: ignore[assignment]
        bench.submit("a", prompt=4, max_tokens=20)
        bench.run()
        steps.append(bench.statistics().steps)
    assert steps[0] - steps[1] == 8 - lookahead, "a step in flight is wasted"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("max_tokens", [2, 3, 5])
def test_the_limit_ends_a_sequence_among_forced_tokens(lookahead: int, max_tokens: int) -> None:
    bench = Bench(lookahead=lookahead)
    bench.runner.forces = forces_behind(6, 4 + 2)  # type: ignore[assignment]
    request = bench.submit("a", prompt=4, max_tokens=max_tokens)
    bench.run()
    bench.assert_undisturbed(request)
    bench.assert_idle()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_stop_token_among_forced_tokens_ends_it(lookahead: int) -> None:
    bench = Bench(lookahead=lookahead)
    bench.submit("first", prompt=(1, 2, 3), max_tokens=9)
    bench.run()
    stop = bench.heard["first"].tokens[3]
    bench.runner.forces = forces_behind(6, 3 + 2)  # type: ignore[assignment]
    request = bench.submit("a", prompt=(1, 2, 3), max_tokens=9, stop_token_ids=(stop,))
    bench.run()
    bench.assert_undisturbed(request)
    assert bench.heard["a"].finish == Finish(reason=FinishReason.STOP, stop_token_id=stop)
    bench.assert_idle()


def test_a_long_run_of_forced_tokens_is_fed_within_the_prefill_budget() -> None:
    bench = Bench(prefill_tokens=8, lookahead=1)
    bench.runner.forces = forces_behind(40, 4 + 2)  # type: ignore[assignment]
    requests = [bench.submit(id_, prompt=4, max_tokens=60) for id_ in ("a", "b")]
    while bench.scheduler.has_work:
        bench.step()
        assert sum(chunk.count for chunk in bench.plan.prefill) <= 8
    for request in requests:
        bench.assert_undisturbed(request)


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(60))
def test_random_lives_gain_what_they_would_gain_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside faults, cancels and preemptions, with steps in flight."""
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)
    chance = random.Random(seed)
    block = chance.choice((1, 4, 16))
    bench = Bench(
        max_running=chance.choice((2, 5)),
        prefill_tokens=chance.choice((8, 64)),
        lookahead=chance.choice((0, 1)),
        block=block,
        blocks=chance.choice((0, -(-60 // block) * 2)),
        cache=chance.random() < 0.5,
        share=chance.random() < 0.5,
    )
    bench.runner.forces = lambda tokens: tokens[-1] % 7 if tokens[-1] % 3 == 0 else 0
    bench.runner.raises = lambda plan: chance.random() < 0.03
    bench.runner.raises_late = lambda plan: chance.random() < 0.03
    requests: list[Submit] = []
    for i in range(30):
        tokens = chance.randint(1, 40)
        stops = tuple(chance.sample(range(1000), chance.choice((0, 60))))
        requests.append(bench.submit(f"{i}", prompt=chance.randint(1, 20), max_tokens=tokens, stop_token_ids=stops))
        for _ in range(chance.choice((0, 1, 9))):
            bench.step()
        if chance.random() < 0.1:
            bench.cancel(f"{chance.randint(0, i)}", CancelReason.CLIENT)
    bench.run(steps=9000)
    for request in requests:
        finish = bench.heard[request.id].finish
        assert finish is not None
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            bench.assert_undisturbed(request)
    bench.assert_idle()


def sequence(**books: int) -> Sequence:
    seq = Sequence.of(Submit(id="a", prompt=(1, 2), max_tokens=9), order=1, now=0.0)
    seq.num_computed_tokens = 1
    seq.plan_decode(1, 0)
    for name, value in books.items():
        setattr(seq, name, value)
    return seq


def test_a_runner_may_force_tokens_only_with_one_row_in_flight() -> None:
    with pytest.raises(AssertionError, match="at most one is in flight"):
        sequence(tokens_in_flight=3).settle_decode(0, RowTokens("a", (5, 6), forced=1))


def test_a_row_gains_no_token_that_was_forced_before_it() -> None:
    with pytest.raises(AssertionError, match="not gained again"):
        sequence(superseded=1).settle_decode(0, RowTokens("a", (5,)))


def test_at_least_one_of_the_tokens_is_sampled() -> None:
    with pytest.raises(AssertionError, match="gains a token"):
        sequence().settle_decode(0, RowTokens("a", (5,), forced=1))


# Their chunks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "counted"), [(20, 5), (4, 2)])
def test_forced_tokens_count_as_generated_ones_and_not_as_a_prompt(max_tokens: int, counted: int) -> None:
    """Those behind the end do not count."""
    bench = Bench(lookahead=1)
    bench.runner.forces = forces_behind(5, 4 + 2)  # type: ignore[assignment]
    bench.submit("a", prompt=4, max_tokens=max_tokens)
    bench.run()
    found = bench.statistics()
    assert (found.forced_tokens, found.completion_tokens, found.prompt_tokens) == (counted, max_tokens, 4)


def test_a_chunk_of_forced_tokens_is_no_progress_of_a_prompt() -> None:
    bench = Bench()
    bench.runner.forces = forces_behind(3, 4 + 2)  # type: ignore[assignment]
    bench.submit("a", prompt=4, max_tokens=20)
    bench.run()
    assert bench.heard["a"].prompt_done == [4]


def with_costs() -> PrefillBudget:
    """A budget that knows that a decode step takes 10 ms, and a token of a prompt beside it 1 ms."""
    budget = PrefillBudget(512)
    for tokens in (64, 8, 64, 8):
        budget.observe(budget.charge(tokens, decoding=4), prefill_s=0.001 * tokens, decode_s=0.01)
    for _ in range(20):
        budget.observe(budget.charge(0, decoding=4), prefill_s=0.0, decode_s=0.01)
    return budget


def line(budget: PrefillBudget) -> tuple[float, float]:
    return budget._times.chunk_cost(beside=True).line()


def test_chunks_of_forced_tokens_are_paid_and_teach_nothing() -> None:
    idle, paying = with_costs(), with_costs()
    before = line(idle)
    for budget, tokens in ((idle, 0), (paying, 6)):
        budget._credit_s = 0.0
        budget.observe(budget.charge(tokens, decoding=4, forced=tokens), prefill_s=0.005 * tokens, decode_s=0.01)
    assert line(paying) == before
    assert paying._credit_s == pytest.approx(idle._credit_s - 0.03)


def test_mixed_steps_with_forced_tokens_disprove_nothing() -> None:
    budget = with_costs()
    decode_s = budget._times.decode_s
    for _ in range(5):
        found = budget.observe(
            budget.charge(6, decoding=4, forced=6), prefill_s=0.0, decode_s=0.0, mixed_s=0.9 * decode_s
        )
        assert found == (0.0, pytest.approx(0.9 * decode_s))
    assert budget._times.decode_s == decode_s


def test_a_prompt_beside_forced_tokens_teaches_its_part() -> None:
    alone, together = with_costs(), with_costs()
    alone.observe(alone.charge(30, decoding=4), prefill_s=0.06, decode_s=0.0)
    together.observe(together.charge(40, decoding=4, forced=10), prefill_s=0.08, decode_s=0.0)
    assert line(together) == pytest.approx(line(alone))


def test_forced_tokens_wait_for_credit_where_those_of_a_prompt_that_ends_do_not() -> None:
    budget = with_costs()
    assert budget.split([6, 1, 6], decoding=4, forced=(0, 1)).tokens == [6, 1, 6]
    budget._credit_s = 0.0
    assert budget.split([6, 1, 6], decoding=4, forced=(0, 1)).tokens == [0, 1, 6], "one token is what a row gets anyway"
    assert budget.split([6], decoding=4, forced=(0,)).tokens == [0]


@pytest.mark.parametrize("constrained", [False, True])
def test_forced_tokens_are_paid_beside_sequences_that_have_none(constrained: bool) -> None:
    bench = Bench()
    bench.runner.forces = lambda tokens: 4 if len(tokens) == 12 and tokens[0] == 1 else 0
    bench.runner.grammars["x"] = READY
    bench.runner.cost = lambda prefill, decode: (0.002 * prefill, 0.01)
    constraint = Constraint("regex", "x")
    bench.submit("other", prompt=(7, 8), max_tokens=60, constraint=constraint if constrained else None)
    bench.submit("a", prompt=(1, *range(9)), max_tokens=20, constraint=constraint)
    bench.until(lambda: len(bench.heard["a"].tokens) == 6)
    bench.scheduler._prefill_budget._credit_s = -0.05
    bench.step()
    assert [chunk.count for chunk in bench.plan.prefill] == ([4] if constrained else [])
    bench.run()
    assert len(bench.heard["a"].tokens) == 20
