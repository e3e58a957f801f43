"""How a step's prefill budget is split among prompts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.core.chunk_limits import MIN_CHUNK
from treadle.core.prefill_budget import share

budgets = st.integers(min_value=0, max_value=2000)
needs = st.lists(st.integers(min_value=1, max_value=3000), max_size=40)


@given(budgets, needs)
def test_nobody_gets_more_than_is_needed_and_all_no_more_than_there_is(budget: int, remaining: list[int]) -> None:
    shares = share(budget, remaining)
    assert len(shares) == len(remaining)
    assert all(0 <= got <= need for got, need in zip(shares, remaining, strict=True))
    assert sum(shares) <= budget


@given(st.integers(min_value=1, max_value=2000), needs)
def test_a_budget_is_used_up_but_for_a_crumb(budget: int, remaining: list[int]) -> None:
    assert sum(share(budget, remaining)) > min(budget, sum(remaining)) - MIN_CHUNK


@given(budgets, needs)
def test_no_crumbs_beside_others(budget: int, remaining: list[int]) -> None:
    """A pass over the model for a few tokens is not worth it, unless they finish a prompt or nobody gets more."""
    served = [(got, need) for got, need in zip(share(budget, remaining), remaining, strict=True) if got]
    assert len(served) <= 1 or all(got >= min(MIN_CHUNK, need) for got, need in served)


@given(st.integers(min_value=1, max_value=600), st.lists(st.integers(1, 400), min_size=1, max_size=20))
@settings(max_examples=60)
def test_in_turn_nobody_starves(budget: int, remaining: list[int]) -> None:
    """Whoever was served goes to the back; each is served within as many steps as there are prompts."""
    queue = [[need, 0] for need in remaining]  # what is left, and the steps since it was served
    while queue:
        shares = share(budget, [need for need, _ in queue])
        assert any(shares)
        for entry, got in zip(queue, shares, strict=True):
            entry[0] -= got
            entry[1] = 0 if got else entry[1] + 1
            assert entry[1] <= len(remaining)
        left = [(entry, got) for entry, got in zip(queue, shares, strict=True) if entry[0]]
        queue = [entry for entry, got in left if not got] + [entry for entry, got in left if got]


@given(st.integers(min_value=2 * MIN_CHUNK, max_value=2000), st.integers(1, 100))
def test_a_short_prompt_overtakes_a_long_one(budget: int, short: int) -> None:
    long = 100_000
    steps = 0
    while short:
        got_long, got_short = share(budget, [long, short])
        assert got_short >= min(short, budget // 2 - MIN_CHUNK)
        long -= got_long
        short -= got_short
        steps += 1
    assert steps <= 100 // MIN_CHUNK + 1


def test_what_the_short_ones_leave_goes_to_the_others() -> None:
    assert share(100, [10, 1000]) == [10, 90]
    assert share(90, [10, 1000, 1000]) == [10, 40, 40]


def test_where_it_is_too_little_for_all_the_first_are_served() -> None:
    assert share(32, [100, 100, 100]) == [16, 16, 0]
    assert share(8, [100, 100]) == [8, 0]


def test_a_crumb_goes_to_who_can_use_it() -> None:
    assert share(20, [100, 100]) == [20, 0]
    assert share(40, [20, 100, 100]) == [20, 20, 0]
    assert share(20, [16, 100]) == [16, 0]


def test_a_crumb_that_finishes_a_prompt_is_worth_it() -> None:
    assert share(20, [100, 4]) == [16, 4]


def test_nothing_to_share() -> None:
    assert share(100, []) == []
    assert share(0, [5, 5]) == [0, 0]


@given(st.integers(0, 2000), st.lists(st.integers(1, 3000), max_size=8))
def test_with_a_coarse_quantum_every_part_ends_its_prompt_or_is_a_multiple(budget: int, remaining: list[int]) -> None:
    """On CUDA every other length of a chunk is planned anew."""
    shares = share(budget, remaining, 256)
    assert sum(shares) <= budget
    for got, need in zip(shares, remaining, strict=True):
        assert got == need or (got < need and got % 256 == 0)
    if any(min(need, 256) <= budget for need in remaining):
        assert sum(shares) > 0


def test_a_coarse_quantum_is_dealt_out_in_turn() -> None:
    assert share(512, [1000, 1000, 1000], 256) == [256, 256, 0]
    assert share(512, [1000, 100], 256) == [256, 100]
    assert share(600, [1000, 100], 256) == [256, 100]
    assert share(2048, [511], 256) == [511]
    assert share(255, [1000], 256) == [0]
