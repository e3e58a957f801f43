"""Prefill beside decoding rows, on machines that are formulas: seconds here are simulated, never measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.drive import Bench
from treadle.core.capabilities import StepCost
from treadle.core.chunk_cost import CHUNK_S, LEAST_OVERHEADS, LONGEST_CHUNK_S, WORTH_OVERHEADS, ChunkCost
from treadle.core.chunk_limits import FIRST_CHUNK, MIN_CHUNK, ChunkLimits, Work
from treadle.core.encodings import image_limits
from treadle.core.image import VisionCapabilities
from treadle.core.prefill_budget import LEAST_SHARE, MOST_SHARE, PrefillBudget


def done(
    pace: PrefillBudget,
    *,
    prefill_tokens: int,
    prefill_s: float,
    decode_s: float,
    decoding: int | None = None,
    on_credit: float = 1.0,
) -> None:
    """A step of that is charged and finished; `decoding` rows beside the chunks, or some if decoding took any time."""
    decoding = 4 * (decode_s > 0) if decoding is None else decoding
    charge = pace.charge(prefill_tokens, decoding=decoding, on_credit=on_credit)
    pace.observe(charge, prefill_s=prefill_s, decode_s=decode_s)


@dataclass
class Machine:
    """A decode step takes `decode_s`; a chunk of n tokens `overhead_s + n * token_s`, each within +-`noise`."""

    decode_s: float
    overhead_s: float
    token_s: float
    noise: float = 0.0
    flat: int = 0  # tokens that cost nothing, as where reading the weights takes all the time
    slow: frozenset[int] = frozenset()  # steps in which a chunk takes 50 times as long

    def chunk_s(self, tokens: int) -> float:
        return self.overhead_s + self.token_s * max(0, tokens - self.flat) if tokens else 0.0


@dataclass
class Run:
    """What a prefill beside decoding rows came to."""

    machine: Machine
    left: int = 0
    chunks: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """The decoding rows' rate as a part of what it is alone."""
        return self.machine.decode_s * len(self.gaps) / sum(self.gaps)

    @property
    def longest_idle(self) -> int:
        """The most steps in a row without prefill."""
        worst = idle = 0
        for chunk in self.chunks:
            idle = 0 if chunk else idle + 1
            worst = max(worst, idle)
        return worst


def beside(
    machine: Machine,
    *,
    prompt: int = 4000,
    prefilling: int = 1,
    decoding: int = 4,
    max_tokens: int = 512,
    seed: int = 0,
) -> Run:
    """A prompt prefills beside rows that have decoded for a while."""
    chance = random.Random(seed)
    pace = PrefillBudget(max_tokens)
    for tokens in (64, 40):
        pace.budget(prefilling=1, decoding=0)
        done(pace, prefill_tokens=tokens, prefill_s=machine.chunk_s(tokens), decode_s=machine.decode_s, decoding=0)
    run = Run(machine, left=prompt)
    while run.left and len(run.chunks) < 20_000:
        chunk = min(run.left, pace.budget(prefilling=prefilling, decoding=decoding))
        prefill_s = machine.chunk_s(chunk) * chance.uniform(1 - machine.noise, 1 + machine.noise)
        decode_s = machine.decode_s * chance.uniform(1 - machine.noise, 1 + machine.noise)
        if len(run.chunks) in machine.slow:
            prefill_s *= 50
        done(pace, prefill_tokens=chunk, prefill_s=prefill_s, decode_s=decode_s)
        run.left -= chunk
        run.chunks.append(chunk)
        run.gaps.append(prefill_s + decode_s)
    return run


CPU = Machine(decode_s=0.17, overhead_s=0.06, token_s=0.0038, noise=0.1)
PROPORTIONAL = Machine(decode_s=0.17, overhead_s=0.0, token_s=0.004, noise=0.1)
SMALL_OVERHEAD = Machine(decode_s=0.02, overhead_s=0.004, token_s=0.0005, noise=0.1)
WEIGHTS_BOUND = Machine(decode_s=0.007, overhead_s=0.006, token_s=70e-6, noise=0.1, flat=128)
NEARLY_FREE = Machine(decode_s=0.02, overhead_s=0.001, token_s=1e-6, noise=0.1)
OVERHEAD_ABOVE_STEP = Machine(decode_s=0.02, overhead_s=0.05, token_s=0.001, noise=0.1)
DEAR_TOKENS = Machine(decode_s=0.05, overhead_s=0.0, token_s=0.01, noise=0.1)
ALL = {
    "cpu": CPU,
    "proportional": PROPORTIONAL,
    "small overhead": SMALL_OVERHEAD,
    "weights bound": WEIGHTS_BOUND,
    "nearly free": NEARLY_FREE,
    "overhead above a step": OVERHEAD_ABOVE_STEP,
    "dear tokens": DEAR_TOKENS,
}


# A long prompt beside decoding rows (P3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_decoding_rows_keep_their_rate_and_the_prompt_gets_on(name: str, seed: int) -> None:
    """P3: they keep 70 %, whatever a chunk costs; no prompt starves."""
    run = beside(ALL[name], seed=seed)
    assert run.left == 0
    assert run.kept >= 0.69
    assert run.longest_idle <= (16 if name == "overhead above a step" else 10)


@pytest.mark.parametrize("name", ["cpu", "proportional", "small overhead", "nearly free"])
def test_a_step_stays_within_twice_a_decode_step(name: str) -> None:
    """P3, where a chunk can be that short at all."""
    run = beside(ALL[name])
    assert max(run.gaps) <= 2 * (1 + 2 * run.machine.noise) * run.machine.decode_s
    assert sorted(run.gaps)[int(0.99 * len(run.gaps))] <= 2 * run.machine.decode_s


def test_prefill_takes_the_share_that_decoding_rows_can_spare() -> None:
    run = beside(PROPORTIONAL)
    assert run.kept <= 0.8


def test_where_a_chunk_is_mostly_overhead_it_takes_what_comes_with_it() -> None:
    run = beside(WEIGHTS_BOUND)
    used = [chunk for chunk in run.chunks if chunk]
    assert sum(used) / len(used) >= 2 * MIN_CHUNK
    assert sorted(run.gaps)[int(0.95 * len(run.gaps))] <= 2.2 * run.machine.decode_s


def test_nearly_free_tokens_go_in_at_the_most_a_step_may_take() -> None:
    run = beside(NEARLY_FREE, max_tokens=256)
    assert max(run.chunks) == 256


@pytest.mark.parametrize("name", ALL)
def test_one_slow_chunk_does_not_hold_prefill_up_for_long(name: str) -> None:
    machine = ALL[name]
    first = next(i for i, chunk in enumerate(beside(machine).chunks) if chunk and i > 2)
    slow = Machine(**{**vars(machine), "slow": frozenset({first})})
    run = beside(slow)
    assert run.left == 0
    assert run.longest_idle <= 20
    before, after = beside(machine), run.chunks[first + 1 :]
    assert len(after) <= 1.3 * len(before.chunks) + 20


# A burst (P1)


def test_the_share_grows_with_those_who_wait_beside_those_who_run() -> None:
    """P1: up to two thirds of the time, so that a burst gets in soon; a step stays within about three decode steps."""
    few = beside(PROPORTIONAL, prefilling=4, decoding=4)
    some = beside(PROPORTIONAL, prefilling=8, decoding=4)
    most = beside(PROPORTIONAL, prefilling=20, decoding=4)
    beyond = beside(PROPORTIONAL, prefilling=64, decoding=1)
    assert few.kept > some.kept > most.kept
    assert most.kept == pytest.approx(1 / (1 + MOST_SHARE), abs=0.12)
    assert beyond.kept == pytest.approx(most.kept, abs=0.05)
    assert max(beyond.gaps) <= 3.6 * PROPORTIONAL.decode_s
    assert few.kept >= 1 / (1 + LEAST_SHARE) - 0.03


@pytest.mark.parametrize("rows", [16, 64])
def test_a_staggered_burst_has_a_flat_time_to_first_token(rows: int) -> None:
    """P1, B2: prefill outpaces the arrivals, and the last is served as the first."""
    machine = Machine(decode_s=0.02, overhead_s=0.001, token_s=0.0001)
    bench = Bench(max_running=rows)
    bench.runner.cost = lambda prefill, decode: (
        machine.chunk_s(prefill),
        machine.decode_s + 0.0002 * decode if decode else 0.0,
    )
    sent: dict[str, float] = {}
    while len(sent) < rows or bench.scheduler.has_work:
        while len(sent) < rows and bench.now >= 0.1 * len(sent):
            id_ = f"{len(sent)}"
            sent[id_] = 0.1 * len(sent)
            bench.submit(id_, prompt=100, max_tokens=64)
        bench.step(0.001)
    waits = [(bench.heard[id_].first_token or 0) - at for id_, at in sent.items()]
    steady = sorted(waits[4:])
    assert steady[-1] <= 0.09, "two decode steps and a chunk or two"
    assert steady[-1] / steady[len(steady) // 2] <= 1.5


def test_a_short_prompt_overtakes_a_long_one() -> None:
    """P4"""
    bench = Bench(max_running=8)
    bench.runner.cost = lambda prefill, decode: (CPU.chunk_s(prefill), CPU.decode_s if decode else 0.0)
    for i in range(4):
        bench.submit(f"decoder {i}", max_tokens=2000)
    bench.until(lambda: bench.statistics().prefilling == 0 and bench.statistics().running == 4)
    bench.submit("long", prompt=3000)
    for _ in range(20):
        bench.step()
    bench.submit("short", prompt=30)
    bench.until(lambda: bench.heard["short"].first_token is not None, steps=25)
    assert bench.heard["long"].first_token is None


# Quick prompts


def learned(machine: Machine, max_tokens: int = 512) -> PrefillBudget:
    pace = PrefillBudget(max_tokens)
    for tokens in (64, 40, 16):
        pace.split([tokens], decoding=0)
        done(pace, prefill_tokens=tokens, prefill_s=machine.chunk_s(tokens), decode_s=machine.decode_s, decoding=0)
    return pace


def test_prompts_that_one_step_can_end_go_in_together_and_at_once() -> None:
    """P1, B1: also where the credit is used up by a long one."""
    pace = learned(PROPORTIONAL)
    pace.split([2000], decoding=4)
    done(pace, prefill_tokens=400, prefill_s=PROPORTIONAL.chunk_s(400), decode_s=PROPORTIONAL.decode_s)
    assert pace.split([2000], decoding=4).tokens == [0]
    assert pace.split([12, 2000, 15], decoding=4).tokens == [12, 0, 15]


@pytest.mark.parametrize(("decoding", "steps"), [(4, 2.0), (64, 2.0), (96, 4 / 3), (128, 1.0), (500, 1.0)])
def test_beside_a_crowd_quick_prompts_take_less_of_a_step(decoding: int, steps: float) -> None:
    """P2: each of so many would wait."""
    taken = sum(learned(PROPORTIONAL).split([5] * 40, decoding=decoding).tokens)
    most = steps * PROPORTIONAL.decode_s / PROPORTIONAL.token_s
    assert 0.85 * most - 5 <= taken <= 1.15 * most


def test_what_quick_prompts_cost_is_not_taken_from_the_long_one() -> None:
    """P4: short requests that keep coming do not starve it."""
    pace, long = learned(CPU), 600
    for _ in range(60):
        shares = pace.split([long, 12], decoding=4)
        got, quick = shares.tokens
        assert quick == 12
        long -= got
        prefill_s = CPU.chunk_s(got + quick)
        done(
            pace,
            prefill_tokens=got + quick,
            prefill_s=prefill_s,
            decode_s=CPU.decode_s,
            on_credit=shares.on_credit,
        )
        if long <= 80:  # one step can end it: it is quick itself
            return
    raise AssertionError(f"{long} tokens are left")


@pytest.mark.untraced
@pytest.mark.parametrize("name", ALL)
@given(needs=st.lists(st.integers(1, 600), min_size=1, max_size=30), decoding=st.integers(0, 16))
@settings(max_examples=40)
def test_everyone_gets_in_and_a_step_is_bounded(name: str, needs: list[int], decoding: int) -> None:
    """No more than is needed, no more than a step may take, nobody is left out."""
    machine, queue = ALL[name], [[need] for need in needs]
    pace = learned(machine, max_tokens=128)
    for _ in range(12 * sum(needs) // MIN_CHUNK + 40 * len(needs)):
        shares, on_credit = pace.split([need for (need,) in queue], decoding=decoding)
        assert sum(shares) <= 128
        assert all(0 <= got <= need for got, (need,) in zip(shares, queue, strict=True))
        done(
            pace,
            prefill_tokens=sum(shares),
            prefill_s=machine.chunk_s(sum(shares)),
            decode_s=machine.decode_s if decoding else 0.0,
            on_credit=on_credit,
        )
        for entry, got in zip(queue, shares, strict=True):
            entry[0] -= got
        left = [(entry, got) for entry, got in zip(queue, shares, strict=True) if entry[0]]
        queue = [entry for entry, got in left if not got] + [entry for entry, got in left if got]
        if not queue:
            return
    raise AssertionError(f"{queue} never ended")


# Where nothing decodes, and at the start


def test_the_first_chunk_is_small_as_nothing_is_known() -> None:
    assert PrefillBudget(512).budget(prefilling=1, decoding=0) == FIRST_CHUNK
    assert PrefillBudget(512).budget(prefilling=1, decoding=3) == FIRST_CHUNK
    assert PrefillBudget(8).budget(prefilling=1, decoding=0) == 8


def test_a_measured_machine_begins_with_chunks_that_it_can_take() -> None:
    """The warm-up times chunks: a first burst has not to find out what they take."""
    known = tuple(StepCost(0, tokens, 0.008 + 0.00004 * tokens) for tokens in (64, 256, 1024))
    pace = PrefillBudget(2048, chunks={Work.PROMPTS: known})
    assert pace.budget(prefilling=8, decoding=0) == 2048
    assert PrefillBudget(100_000, chunks={Work.PROMPTS: known}).budget(prefilling=8, decoding=0) == 2048, (
        "twice what was tried"
    )
    for _ in range(3):
        done(pace, prefill_tokens=0, prefill_s=0.0, decode_s=0.004)
        tokens = pace.budget(prefilling=8, decoding=1)
    assert 100 < tokens < 1000


def test_one_measured_chunk_does_not_tell_its_overhead() -> None:
    assert (
        PrefillBudget(2048, chunks={Work.PROMPTS: (StepCost(0, 64, 0.3),)}).budget(prefilling=1, decoding=0)
        == FIRST_CHUNK
    )


def test_alone_a_chunk_takes_about_as_long_as_a_cancel_may_wait() -> None:
    pace = PrefillBudget(100_000)
    for _ in range(12):
        tokens = pace.budget(prefilling=1, decoding=0)
        done(pace, prefill_tokens=tokens, prefill_s=0.01 + 0.0005 * tokens, decode_s=0.0)
    assert 0.01 + 0.0005 * tokens == pytest.approx(CHUNK_S, rel=0.05)


@pytest.mark.parametrize(
    ("overhead_s", "chunk_s"),
    [
        (0.11, WORTH_OVERHEADS * 0.11),
        (0.2, LONGEST_CHUNK_S),
        (0.5, LEAST_OVERHEADS * 0.5),
        (0.8, LEAST_OVERHEADS * 0.8),
    ],
)
def test_alone_a_chunk_is_worth_reading_the_weights_for(overhead_s: float, chunk_s: float) -> None:
    """Where that alone takes a tenth of a second and more: found out though the first chunks are of one size."""
    pace = PrefillBudget(100_000)
    for _ in range(14):
        tokens = pace.budget(prefilling=1, decoding=0)
        done(pace, prefill_tokens=tokens, prefill_s=overhead_s + 0.0014 * tokens, decode_s=0.0)
    assert overhead_s + 0.0014 * tokens == pytest.approx(chunk_s, rel=0.05)


def test_alone_chunks_stay_worth_their_overhead_where_a_machine_becomes_slow() -> None:
    """An overhead of more than LONGEST_CHUNK_S leaves no time for tokens."""
    pace = PrefillBudget(100_000)
    for seconds in (1.0, 10.0):
        spent = useful = 0.0
        for _ in range(40):
            tokens = pace.budget(prefilling=1, decoding=0)
            took = seconds * (0.08 + 0.002 * tokens)
            spent, useful = spent + took, useful + seconds * 0.002 * tokens
            done(pace, prefill_tokens=tokens, prefill_s=took, decode_s=0.0)
        assert useful > 0.4 * spent


def test_alone_no_chunk_waits_for_an_overhead_that_was_told_wrong() -> None:
    """A machine that becomes six times as slow makes small chunks look like overhead alone."""
    pace = PrefillBudget(100_000)
    for tokens in (16, 64, 256, 16, 64, 256):
        done(pace, prefill_tokens=tokens, prefill_s=0.7 + 0.06 * tokens, decode_s=0.0)
    longest = 0.0
    for _ in range(60):
        tokens = pace.budget(prefilling=1, decoding=0)
        longest = max(longest, 6 * (0.7 + 0.06 * tokens))
        done(pace, prefill_tokens=tokens, prefill_s=6 * (0.7 + 0.06 * tokens), decode_s=0.0)
    assert longest < 2 * 6 * (0.7 + 0.06 * MIN_CHUNK)


def test_beside_decoding_rows_the_weights_are_read_anyway() -> None:
    """What a pass of its own costs says little of what the same tokens cost beside decoding rows, and is kept apart."""
    pace = PrefillBudget(512)
    for tokens in (64, 200, 300):
        pace.budget(prefilling=1, decoding=0)
        done(pace, prefill_tokens=tokens, prefill_s=0.11 + 0.0014 * tokens, decode_s=0.0)
    alone = pace.budget(prefilling=1, decoding=0)
    for _ in range(40):
        tokens = pace.budget(prefilling=1, decoding=4)
        done(pace, prefill_tokens=tokens, prefill_s=0.0014 * tokens, decode_s=0.15)
    assert 0.0014 * tokens == pytest.approx(LEAST_SHARE * 0.15, rel=0.1)
    assert pace.budget(prefilling=1, decoding=0) == alone


SIZES = {
    Work.IMAGES: image_limits(VisionCapabilities()),
    Work.SCORING: ChunkLimits(4096),
    Work.LOOK_AHEAD: ChunkLimits(1024, quantum=1),
}


@pytest.mark.parametrize(("work", "piece"), [(Work.IMAGES, 200), (Work.SCORING, 16), (Work.LOOK_AHEAD, 8)])
def test_beside_decoding_rows_pieces_of_one_size_grow(work: Work, piece: int) -> None:
    """Layers of images of one size are equal pieces, and so are chunks of a long prompt: they show no overhead."""
    pace, pieces = PrefillBudget(512, others=SIZES), [1]
    for _ in range(40):
        pace.observe(
            pace.charge(pieces[-1] * piece, decoding=4, work=work), prefill_s=0.001 * pieces[-1], decode_s=0.01
        )
        pieces.append(pace.budget(prefilling=1, decoding=4, work=work) // piece)
    assert max(pieces[:8]) == int(LEAST_SHARE * 0.01 / 0.001)
    assert sum(pieces) >= 2 * len(pieces)


def test_a_budget_is_never_above_what_a_step_may_take() -> None:
    pace = PrefillBudget(10)
    done(pace, prefill_tokens=10, prefill_s=0.001, decode_s=0.001)
    assert pace.budget(prefilling=1, decoding=0) == 10


def test_a_clock_too_coarse_to_show_decode_time_does_not_stop_prefill() -> None:
    pace = PrefillBudget(512)
    for _ in range(5):
        assert pace.budget(prefilling=1, decoding=3) > 0
        done(pace, prefill_tokens=64, prefill_s=0.01, decode_s=0.0, decoding=3)
    pace = PrefillBudget(512)
    for _ in range(5):
        assert pace.budget(prefilling=1, decoding=3) == FIRST_CHUNK
        done(pace, prefill_tokens=64, prefill_s=0.0, decode_s=0.0, decoding=3)


def test_a_chunk_nobody_waited_for_is_not_charged_to_the_next() -> None:
    pace = PrefillBudget(512)
    for tokens in (64, 40):
        pace.budget(prefilling=3, decoding=0)
        done(pace, prefill_tokens=tokens, prefill_s=0.2, decode_s=0.02, decoding=0)
    assert pace.budget(prefilling=2, decoding=1) > 0


@pytest.mark.parametrize("factor", [50, 0.02])
def test_alone_it_recovers_from_a_first_measurement_that_misleads(factor: float) -> None:
    pace, sizes = PrefillBudget(512), []
    for i in range(40):
        tokens = pace.budget(prefilling=1, decoding=0)
        done(
            pace,
            prefill_tokens=tokens,
            prefill_s=(factor if i == 0 else 1) * SMALL_OVERHEAD.chunk_s(tokens),
            decode_s=0,
        )
        sizes.append(tokens)
    assert SMALL_OVERHEAD.chunk_s(sizes[-1]) == pytest.approx(CHUNK_S, rel=0.3)


# The cost of a chunk


def feed(cost: ChunkCost, line: Callable[[int], float], sizes: list[int]) -> ChunkCost:
    for tokens in sizes:
        cost.observe(tokens, line(tokens))
    return cost


def test_the_line_is_found_where_sizes_differ() -> None:
    cost = feed(ChunkCost(), lambda n: 0.02 + 0.001 * n, [64, 16, 100, 30])
    assert cost.line() == pytest.approx((0.02, 0.001))
    assert cost.seconds(50) == pytest.approx(0.07)
    assert cost.tokens(0.0705) == 50
    assert cost.tokens(0.01) == 0


def test_what_was_found_of_the_overhead_stays_while_sizes_hardly_differ() -> None:
    cost = feed(ChunkCost(), lambda n: 0.02 + 0.001 * n, [64, 16, *[16] * 200])
    assert cost.line() == pytest.approx((0.02, 0.001), rel=0.01)


def test_one_size_alone_is_taken_as_proportional() -> None:
    assert feed(ChunkCost(), lambda n: 0.02 + 0.001 * n, [20] * 5).line() == pytest.approx((0.0, 0.002))


def test_where_longer_chunks_seem_cheaper_all_but_little_is_overhead() -> None:
    cost = feed(ChunkCost(), lambda n: 0.1 if n == 16 else 0.05, [16, 64, 16, 64])
    overhead, per_token = cost.line()
    assert 0.05 <= overhead <= 0.1
    assert 0 < per_token <= 0.001


def test_no_token_is_free_even_where_it_seems_so() -> None:
    cost = feed(ChunkCost(), lambda n: 0.02 + 1e-12 * n, [64, 16, 64])
    assert cost.line()[1] > 1e-6


def test_nothing_far_beyond_what_was_tried_is_asked_for() -> None:
    cost = feed(ChunkCost(), lambda n: 0.02 + 1e-12 * n, [64, 16, 64])
    assert cost.tokens(100.0) == 128


def test_a_slow_chunk_counts_for_little_and_a_new_speed_is_learned() -> None:
    cost = feed(ChunkCost(), lambda n: 0.001 * n, [50] * 30)
    cost.observe(50, 50 * 0.05)
    assert cost.seconds(50) <= 2 * 0.05
    feed(cost, lambda n: 0.02 * n, [50] * 40)
    assert cost.seconds(50) == pytest.approx(1.0, rel=0.1)
    feed(cost, lambda n: 0.001 * n, [50] * 12)
    assert cost.seconds(50) == pytest.approx(0.05, rel=0.2)


def test_one_slow_chunk_says_nothing_of_the_overhead_and_two_in_a_row_do() -> None:
    """P3: or the next ones would be far too large."""
    cost = feed(ChunkCost(), lambda n: 0.001 * n, [32, 64, 32, 64])
    cost.observe(32, 0.5)
    assert cost.line()[0] == pytest.approx(0.0)
    assert cost.seconds(64) <= 1.5 * 0.064
    cost.observe(32, 0.5)
    assert cost.line()[0] > 0.05


def test_with_a_coarse_quantum_every_budget_is_a_multiple() -> None:
    pace, sizes = PrefillBudget(1024, 256), set()
    for i in range(40):
        budget = pace.budget(prefilling=1, decoding=i % 2)
        sizes.add(budget)
        done(pace, prefill_tokens=budget, prefill_s=0.004 + 1e-5 * budget, decode_s=0.004 if i % 2 else 0.0)
    assert sizes <= {0, 256, 512, 768, 1024}
    assert max(sizes) == 1024
    assert PrefillBudget(100, 256).budget(prefilling=1, decoding=0) == 100


def test_where_passes_come_in_sizes_every_budget_is_one() -> None:
    sizes = (32, 64, 96, 128, 256, 512, 1024)
    pace, found = PrefillBudget(1024, sizes=sizes), set()
    for i in range(60):
        budget = pace.budget(prefilling=1, decoding=i % 2)
        found.add(budget)
        done(pace, prefill_tokens=budget, prefill_s=0.0004 + 1e-5 * budget, decode_s=0.004 if i % 2 else 0.0)
    assert found <= {0, *sizes}
    assert len(found) > 3
    assert PrefillBudget(30, sizes=sizes).budget(prefilling=1, decoding=0) == 30


def test_budgets_above_all_sizes_stay_as_they_are() -> None:
    pace = PrefillBudget(5000, sizes=(32, 64, 128, 256, 512, 1024))
    for _ in range(20):
        done(pace, prefill_tokens=pace.budget(prefilling=1, decoding=0), prefill_s=1e-3, decode_s=0.0)
    assert pace.budget(prefilling=1, decoding=0) == 5000


def test_chunks_that_cost_nothing_for_ever_divide_by_nothing() -> None:
    """A clock that stands, or a split that gives all of a step to those that decode."""
    cost = ChunkCost()
    cost.observe(100, 1.0)
    for _ in range(3000):
        cost.observe(100, 0.0)
        assert cost.tokens(1.0) >= 0
        assert cost.tokens_alone() >= 0
