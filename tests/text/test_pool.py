from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from treadle.errors import Busy, InvalidRequest, ServerStopping, TreadleError
from treadle.text import TextPool


class Gate:
    """Blocking work that signals its start and ends when it is released."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.open = threading.Event()
        self.ended = threading.Event()

    def work(self) -> str:
        self.started.set()
        assert self.open.wait(60)
        self.ended.set()
        return "done"


@asynccontextmanager
async def pool_of(**options: int) -> AsyncIterator[tuple[TextPool, Callable[[], Any]]]:
    """Yield a pool and a function that starts gated work, returning its gate and task once it runs."""
    pool, gates = TextPool(**options), []

    async def hold() -> tuple[Gate, asyncio.Task[str]]:
        gates.append(gate := Gate())
        task = asyncio.create_task(pool.run(gate.work))
        assert await asyncio.to_thread(gate.started.wait, 30)
        return gate, task

    try:
        yield pool, hold
    finally:
        for gate in gates:
            gate.open.set()
        pool.close()


async def idle(pool: TextPool) -> None:
    async with asyncio.timeout(60):
        while pool.statistics().pending:
            await asyncio.sleep(0)


def with_thread(a: int, *, b: int) -> tuple[int, int, int]:
    return a, b, threading.get_ident()


def test_work_runs_off_the_loops_thread_with_its_arguments() -> None:
    async def main() -> None:
        async with pool_of() as (pool, _):
            assert await pool.run(with_thread, 1, b=2) != (
                1,
                2,
                threading.get_ident(),
            )
            assert await pool.run(divmod, 7, 2) == (3, 1)
            assert pool.statistics().done == 2

    asyncio.run(main())


def test_an_error_reaches_its_caller_alone() -> None:
    def fail() -> None:
        raise InvalidRequest("bad text")

    async def main() -> None:
        async with pool_of(workers=1) as (pool, _):
            with pytest.raises(InvalidRequest, match="bad text"):
                await pool.run(fail)
            assert await pool.run(len, "abc") == 3

    asyncio.run(main())


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, type("Panic", (BaseException,), {})])
def test_what_would_break_the_loop_becomes_an_ordinary_error(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("broken")

    async def main() -> None:
        async with pool_of() as (pool, _):
            with pytest.raises(TreadleError):
                await asyncio.wait_for(pool.run(fail), 30)
            assert await pool.run(len, "abc") == 3

    asyncio.run(main())


def test_work_beyond_the_bound_is_refused_at_once() -> None:
    async def main() -> None:
        async with pool_of(workers=1, max_pending=2) as (pool, hold):
            gate, first = await hold()
            second = asyncio.create_task(pool.run(len, "abc"))
            await asyncio.sleep(0)
            with pytest.raises(Busy) as caught:
                await pool.run(len, "abc")
            assert caught.value.retry_after_s is not None
            assert caught.value.retry_after_s >= 1
            assert (pool.statistics().pending, pool.statistics().refused) == (2, 1)
            gate.open.set()
            assert (await first, await second) == ("done", 3)
            await idle(pool)
            assert await pool.run(len, "abcd") == 4

    asyncio.run(main())


def test_running_work_survives_its_callers_cancellation_and_keeps_its_place_until_it_ends() -> None:
    async def main() -> None:
        async with pool_of(workers=1, max_pending=1) as (pool, hold):
            gate, task = await hold()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(Busy):
                await pool.run(len, "abc")
            gate.open.set()
            assert await asyncio.to_thread(gate.ended.wait, 30)
            await idle(pool)
            assert await pool.run(len, "abc") == 3

    asyncio.run(main())


def test_waiting_work_is_taken_back_with_its_caller() -> None:
    async def main() -> None:
        async with pool_of(workers=1, max_pending=2) as (pool, hold):
            gate, first = await hold()
            ran: list[int] = []
            waiting = asyncio.create_task(pool.run(ran.append, 1))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert pool.statistics().pending == 1
            gate.open.set()
            await first
            await pool.run(len, "")
            assert ran == []

    asyncio.run(main())


def test_close_answers_who_waits_and_who_comes_later() -> None:
    async def main() -> None:
        async with pool_of(workers=1) as (pool, hold):
            gate, first = await hold()
            waiting = asyncio.create_task(pool.run(len, "abc"))
            await asyncio.sleep(0)
            pool.close()
            with pytest.raises(ServerStopping):
                await waiting
            with pytest.raises(ServerStopping):
                await pool.run(len, "abc")
            gate.open.set()
            assert await first == "done"

    asyncio.run(main())
