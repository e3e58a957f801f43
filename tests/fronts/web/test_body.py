from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.aio import in_loop
from treadle.core.refusals import Refusal
from treadle.errors import Busy, RequestTooLarge
from treadle.fronts.web import body as body_module
from treadle.fronts.web.body import EXEMPT_BYTES, Body, BodyBudget, read_body
from treadle.fronts.web.errors import BodyTimeout, ClientLeft


def sends(*parts: bytes, ends: bool = True) -> Any:
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or not ends}

    return receive


async def read(receive: Any, body: Body | None = None, **options: Any) -> bytes:
    into = body or Body(BodyBudget(100), "alice")
    await read_body(receive, [], into, **{"limit": 10, **options})
    return into.data


@in_loop
async def test_a_body_in_pieces_is_whole() -> None:
    assert await read(sends(b"abc", b"", b"def")) == b"abcdef"


@in_loop
async def test_a_large_body_in_uneven_pieces_is_whole() -> None:
    data = bytes(range(251)) * 12_000
    parts = [data[:7], data[7:1_500_000], data[1_500_000:2_100_000], data[2_100_000:], b""]
    assert await read(sends(*parts), Body(BodyBudget(1 << 30), "alice"), limit=len(data)) == data


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


@pytest.fixture
def nothing_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "EXEMPT_BYTES", 0)


@pytest.mark.usefixtures("nothing_exempt")
@in_loop
async def test_a_body_counts_from_its_first_bytes_until_it_is_let_go() -> None:
    budget = BodyBudget(40)
    with Body(budget, "alice") as body:
        reading = asyncio.create_task(read(sends(b"x" * 8, ends=False), body))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert budget.held == 8
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert budget.held == 0
    with Body(budget, "alice") as body:
        assert await read(sends(b"x" * 4, b"y" * 4), body) == b"xxxxyyyy"
        assert budget.held == 8
        body.release()
        assert (budget.held, body.data) == (0, b"")
    assert budget.held == 0
    with Body(budget, "alice") as body, pytest.raises(RequestTooLarge):
        await read(sends(b"x" * 8, b"x" * 3), body)
    assert budget.held == 0


@pytest.mark.usefixtures("nothing_exempt")
def test_a_tenant_holds_a_quarter_and_all_together_the_whole() -> None:
    told: list[Refusal] = []
    budget = BodyBudget(42, told.append)
    for tenant in "abcd":
        Body(budget, tenant).grow(10)
    with pytest.raises(Busy, match="your large requests"):
        Body(budget, "a").grow(1)
    with pytest.raises(Busy, match="too many large requests"):
        Body(budget, "e").grow(3)
    Body(budget, "e").grow(2)
    assert told == [Refusal.BODY_BYTES] * 2


def test_small_bodies_always_come_in() -> None:
    budget = BodyBudget(4 * EXEMPT_BYTES + 4)
    large = Body(budget, "a")
    large.grow(EXEMPT_BYTES + 1)
    small = Body(budget, "a")
    small.grow(EXEMPT_BYTES)
    assert budget.held == EXEMPT_BYTES + 1
    with pytest.raises(Busy):
        small.grow(EXEMPT_BYTES + 1)
    large.release()
    small.grow(EXEMPT_BYTES + 1)
    small.release()
    assert budget.held == 0
