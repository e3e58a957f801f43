"""Runs a workload against a server: each request at its moment, and looks at the server and at itself meanwhile.

All time is the event loop's, so that tests run on a loop whose clock is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol

from .plan import Moment, Request, Workload
from .samples import Sample

LAG_EVERY_S = 0.01
AHEAD = 10
SET_UP_S = 5e-5  # what it takes to set one request up: the round's clock starts when all are


class Send(Protocol):
    """Sends one request and writes what it saw into `sample`; leaves when `leave` is set; tells `heard` of pieces."""

    def __call__(
        self, request: Request, sample: Sample, leave: asyncio.Event, heard: Callable[[int], None]
    ) -> Awaitable[None]: ...


class Progress:
    """How far one request has come, for those whose moment depends on it."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.ended = asyncio.Event()
        self.pieces = 0
        self._waiting: list[tuple[int, asyncio.Event]] = []

    def heard(self, pieces: int) -> None:
        self.pieces += pieces
        for count, event in self._waiting:
            if self.pieces >= count:
                event.set()

    def end(self) -> None:
        """It has ended, or it will never be sent."""
        self.sent.set()
        self.ended.set()
        for _, event in self._waiting:
            event.set()

    async def reach(self, moment: Moment) -> None:
        """Return `delay_s` after the moment's event, or after the end that came instead."""
        if moment.event == "sent":
            await self.sent.wait()
        elif moment.event == "end":
            await self.ended.wait()
        elif self.pieces < moment.count and not self.ended.is_set():
            event = asyncio.Event()
            self._waiting.append((moment.count, event))
            await event.wait()
        if moment.delay_s:
            await asyncio.sleep(moment.delay_s)


class Drive:
    """One run of a workload. `seen` is told of every sample when it is done."""

    def __init__(self, workload: Workload, send: Send, seen: Callable[[Sample], None] = lambda _: None) -> None:
        self._workload = workload
        self._send = send
        self._seen = seen
        self._progress = {request.id: Progress() for request in workload.requests}
        self._open = asyncio.Semaphore(workload.concurrency) if workload.concurrency else contextlib.nullcontext()
        self._start = 0.0

    async def run(self) -> list[Sample]:
        """The samples, in the order of the requests; without those whose time to leave came before they were sent."""
        self._start = self._now() + SET_UP_S * len(self._workload.requests)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._request(request)) for request in self._workload.requests]
        return [sample for task in tasks if (sample := task.result()) is not None]

    async def _request(self, request: Request) -> Sample | None:
        progress = self._progress[request.id]
        async with self._leaving(request) as leave:
            try:
                await self._until_due(request, leave)
                due_s = self._now() - self._start
                async with self._open:
                    return None if leave.is_set() else await self._sent(request, progress, leave, due_s)
            finally:
                progress.end()

    async def _sent(self, request: Request, progress: Progress, leave: asyncio.Event, due_s: float) -> Sample:
        sample = Sample(
            id=request.id, role=request.role, session=request.session, due_s=due_s, sent_s=self._now() - self._start
        )
        progress.sent.set()
        await self._send(request, sample, leave, progress.heard)
        self._seen(sample)
        return sample

    async def _until_due(self, request: Request, leave: asyncio.Event) -> None:
        """Returns when it is due, or at once when its client leaves before that."""
        if request.leave is None:
            await self._due(request)
            return
        ways = [asyncio.ensure_future(self._due(request)), asyncio.ensure_future(leave.wait())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()

    async def _due(self, request: Request) -> None:
        await asyncio.sleep(max(0.0, self._start + request.at_s - self._now()))
        if request.after is not None:
            await self._progress[request.after.of].reach(request.after)

    @contextlib.asynccontextmanager
    async def _leaving(self, request: Request) -> AsyncIterator[asyncio.Event]:
        """An event that is set when it is time for this request's client to leave."""
        leave = asyncio.Event()
        if request.leave is None:
            yield leave
            return
        task = asyncio.create_task(self._leave_at(request.leave, leave))
        try:
            yield leave
        finally:
            task.cancel()

    async def _leave_at(self, moment: Moment, leave: asyncio.Event) -> None:
        await self._progress[moment.of].reach(moment)
        leave.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def in_background(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run `work` beside the block, and end it with the block."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run the block without garbage collection, and with a higher priority where this user may: neither this process
    nor servers that take every core must hold up the clock that measures them. Servers are started outside of it, as
    they would inherit the priority."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, usual - AHEAD)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, usual)


async def watch_own_lag(lags: list[float]) -> None:
    """Note every 10 ms how many seconds late this event loop is."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(max(0.0, loop.time() - due))
