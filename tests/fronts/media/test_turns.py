"""Turns at something: no more than may be at once, fair between tenants, and none is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.aio import in_loop
from treadle.errors import Busy
from treadle.fronts.media.turns import FairTurns


@in_loop
async def test_tenants_take_turns_and_none_has_them_all() -> None:
    turns, order, goes = FairTurns(3, 2, 10.0, "too many"), list[str](), asyncio.Event()

    async def one(tenant: str) -> None:
        async with turns.turn(tenant):
            order.append(tenant)
            await goes.wait()

    tasks = [asyncio.create_task(one(tenant)) for tenant in "aaaaabbc"]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(order) == ["a", "a", "b"]
    goes.set()
    await asyncio.gather(*tasks)
    assert order[3:6] != ["a", "a", "a"]
    assert sorted(order) == list("aaaaabbc")


@in_loop
async def test_who_waits_too_long_is_told_to_come_back() -> None:
    turns = FairTurns(1, 1, 0.01, "too many wait")
    async with turns.turn("a"):
        with pytest.raises(Busy, match="too many wait; try again in about 1 s") as caught:
            async with turns.turn("b"):
                raise AssertionError
    assert caught.value.retry_after_s == 1.0
    async with turns.turn("b"):
        pass


@pytest.mark.parametrize("seed", range(5))
@in_loop
async def test_random_lives_leave_all_turns_free(seed: int) -> None:
    """Some are cancelled while they wait, or when they have just been given a turn."""
    dice, turns, most = random.Random(seed), FairTurns(4, 3, 10.0, "too many"), 0

    async def one(tenant: str) -> None:
        nonlocal most
        async with turns.turn(tenant):
            most = max(most, turns._held.total())
            assert turns._held[tenant] <= 3
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(one(dice.choice("abc"))))
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
        if dice.random() < 0.4:
            dice.choice(tasks[-12:]).cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
    assert most == 4
    assert (turns._held, turns._waiting) == ({}, {})
