"""What decode steps and chunks take, learned from steps of one kind and of both."""

from __future__ import annotations

import pytest

from treadle.core.step_times import Charge, StepTimes

NEXT = 30  # prompt tokens that are prepared while a step is computed


def decode(times: StepTimes, decode_s: float, following: int = 0) -> Charge:
    """A step without prompts; the Charge of the one that is prepared in its time."""
    charge = Charge(following, decoding=2)
    assert times.observe(Charge(decoding=2), prefill_s=0.0, decode_s=decode_s, following=charge) == (0.0, decode_s)
    return charge


def mixed(times: StepTimes, mixed_s: float, charge: Charge | None = None) -> tuple[float, float]:
    return times.observe(charge or Charge(30, decoding=2), prefill_s=0.0, decode_s=0.0, mixed_s=mixed_s)


def test_rows_beside_a_prompt_cost_what_they_did_without() -> None:
    times = StepTimes()
    decode(times, 1.0)
    assert mixed(times, 3.0) == (2.0, 1.0)
    assert mixed(times, 0.5) == (0.0, 0.5)
    assert times.decode_s == 1.0


def test_before_that_is_known_they_cost_what_their_tokens_do() -> None:
    times = StepTimes()
    assert mixed(times, 3.2) == pytest.approx((3.0, 0.2))
    assert times.decode_s == pytest.approx(0.2)
    decode(times, 1.0)
    assert times.decode_s == 1.0


def test_what_was_measured_apart_is_not_split() -> None:
    times = StepTimes()
    assert times.observe(Charge(30, decoding=2), prefill_s=2.0, decode_s=1.0) == (2.0, 1.0)
    assert times.decode_s == 1.0
    assert times.chunk_cost(beside=True).seconds(30) == pytest.approx(2.0)


def test_a_step_of_nothing_takes_nobodys_time() -> None:
    times = StepTimes()
    assert times.observe(Charge(), prefill_s=0.0, decode_s=0.0) == (0.0, 0.0)
    assert times.decode_s == 0.0


def test_a_slow_step_counts_as_half_as_much_again_at_most() -> None:
    times = StepTimes()
    decode(times, 1.0)
    decode(times, 10.0)
    assert times.decode_s == pytest.approx(0.7 + 0.3 * 1.5)


def test_a_step_that_was_held_up_by_prompts_after_it_is_not_what_rows_cost() -> None:
    """P3: the host prepares them in its time. It counts if it was none the longer for it."""
    times = StepTimes()
    decode(times, 1.0)
    decode(times, 2.0, following=NEXT)
    assert times.decode_s == 1.0
    decode(times, 0.5, following=NEXT)
    assert times.decode_s == pytest.approx(0.7 + 0.3 * 0.5)


def test_the_prompts_that_held_it_up_cost_that_as_well() -> None:
    times = StepTimes()
    decode(times, 1.0)
    charge = decode(times, 1.5, following=NEXT)
    mixed(times, 3.0, charge)
    assert charge.cost_s == pytest.approx(0.5 + 2.0)
    assert times.chunk_cost(beside=True).seconds(NEXT) == pytest.approx(2.5)


def test_a_chunk_behind_a_chunk_is_taken_to_hold_it_up_as_long() -> None:
    times = StepTimes()
    decode(times, 1.0)
    for _ in range(60):
        decode(times, 1.5, following=NEXT)
    assert times.delay_s == pytest.approx(0.5)
    first, second = Charge(30, decoding=2), Charge(30, decoding=2)
    times.observe(first, prefill_s=0.0, decode_s=0.0, mixed_s=3.5, following=second)
    assert (first.cost_s, second.cost_s) == pytest.approx((2.0, 0.5))


def test_one_long_delay_is_chance() -> None:
    times = StepTimes()
    decode(times, 1.0)
    decode(times, 100.0, following=NEXT)
    assert times.delay_s <= 0.31


def test_steps_that_are_shorter_with_prompts_disprove_what_it_was_without() -> None:
    """P3: three in a row. What rows cost is then measured by a step that no prompts may have held up."""
    times = StepTimes()
    decode(times, 1.0)
    for _ in range(2):
        assert mixed(times, 0.8) == (0.0, 0.8)
    assert mixed(times, 0.8) == pytest.approx((0.75, 0.05))
    assert times.decode_s < 1.0
    decode(times, 0.9, following=NEXT)
    assert mixed(times, 0.8) == pytest.approx((0.75, 0.05))
    decode(times, 0.4)
    assert times.decode_s == 0.4
    assert mixed(times, 0.8) == pytest.approx((0.4, 0.4))


def test_one_longer_mixed_step_takes_the_disproof_back() -> None:
    times = StepTimes()
    decode(times, 1.0)
    for mixed_s in (0.8, 0.8, 3.0, 0.8, 0.8):
        assert mixed(times, mixed_s)[1] == min(1.0, mixed_s)


def test_where_decoding_was_only_estimated_no_delay_is_seen() -> None:
    """P2: a burst on a fresh server computes both from its first steps on. A delay that is none would allow it twice
    the prompt tokens beside a crowd."""
    times = StepTimes()
    mixed(times, 3.2)
    assert decode(times, 1.0, following=NEXT).cost_s == 0.0
    assert (times.decode_s, times.delay_s) == (1.0, 0.0)
