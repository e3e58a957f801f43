from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.aio import in_loop
from treadle.errors import Busy, RequestTooLarge
from treadle.fronts.web.body import BodyBudget, read_body
from treadle.fronts.web.errors import BodyTimeout, ClientLeft


def sends(*parts: bytes, ends: bool = True) -> Any:
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or not ends}

    return receive


async def read(receive: Any, budget: BodyBudget | None = None, **options: Any) -> bytes:
    return await read_body(receive, [], limit=10, budget=budget or BodyBudget(100), **options)


@in_loop
async def test_a_body_in_pieces_is_whole() -> None:
    assert await read(sends(b"abc", b"", b"def")) == b"abcdef"


@in_loop
async def test_a_body_that_stops_coming_is_not_waited_for() -> None:
    with pytest.raises(BodyTimeout, match="1 bytes"):
        await read(sends(b"a", ends=False), idle_s=0.01)


@in_loop
async def test_a_body_that_trickles_has_an_end() -> None:
    now = iter(range(100))
    with pytest.raises(BodyTimeout):
        await read(sends(*[b"a"] * 9, ends=False), total_s=5, clock=lambda: float(next(now)))


@in_loop
async def test_a_client_that_leaves_ends_the_reading() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeft):
        await read(receive)


@in_loop
async def test_all_half_read_bodies_share_one_budget_and_give_it_back() -> None:
    budget = BodyBudget(12)
    waiting = asyncio.create_task(read(sends(b"x" * 8, ends=False), budget))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert budget.held == 8
    with pytest.raises(Busy):
        await read(sends(b"x" * 8), budget)
    with pytest.raises(RequestTooLarge):
        await read(sends(b"x" * 11), budget)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert budget.held == 0
    assert await read(sends(b"x" * 8), budget) == b"x" * 8
