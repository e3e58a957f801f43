"""Driver of a workload: sends each request at its moment, and watches the event loop's own lag.

All times come from the event loop, so that tests can run with a clock of their own.
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
PRIORITY_GAIN = 10
SET_UP_S = 5e-5  # time to set one request up: the round's clock starts after all of them


class Send(Protocol):
    """Sender of one request. It records the answer in `sample`, leaves when `leave` is set, and calls `on_pieces` with
    counts of pieces."""

    def __call__(
        self, request: Request, sample: Sample, leave: asyncio.Event, on_pieces: Callable[[int], None]
    ) -> Awaitable[None]: ...


class RequestProgress:
    """Progress of one request, for the requests that wait for an event of it."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()
        self.ended = asyncio.Event()
        self.pieces = 0
        self._waiting: list[tuple[int, asyncio.Event]] = []

    def on_pieces(self, pieces: int) -> None:
        self.pieces += pieces
        for count, event in self._waiting:
            if self.pieces >= count:
                event.set()

    def end(self) -> None:
        """Mark the request as ended, or as never sent."""
        self.sent.set()
        self.ended.set()
        for _, event in self._waiting:
            event.set()

    async def reach(self, moment: Moment) -> None:
        """Return `delay_s` after the moment's event, or after an end that came instead."""
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
    """One run of a workload. `on_sample` is called with every sample when it is done."""

    def __init__(self, workload: Workload, send: Send, on_sample: Callable[[Sample], None] = lambda _: None) -> None:
        self._workload = workload
        self._send = send
        self._on_sample = on_sample
        self._progress = {request.id: RequestProgress() for request in workload.requests}
        self._slots = asyncio.Semaphore(workload.concurrency) if workload.concurrency else contextlib.nullcontext()
        self._start = 0.0

    async def run(self) -> list[Sample]:
        """Return the samples, in the order of the requests, without those whose time to leave came before they were
        sent."""
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
                async with self._slots:
                    return None if leave.is_set() else await self._send_recorded(request, progress, leave, due_s)
            finally:
                progress.end()

    async def _send_recorded(
        self, request: Request, progress: RequestProgress, leave: asyncio.Event, due_s: float
    ) -> Sample:
        sample = Sample(
            id=request.id, role=request.role, session=request.session, due_s=due_s, sent_s=self._now() - self._start
        )
        progress.sent.set()
        await self._send(request, sample, leave, progress.on_pieces)
        self._on_sample(sample)
        return sample

    async def _until_due(self, request: Request, leave: asyncio.Event) -> None:
        """Wait until the request is due, or until its client leaves, if that comes first."""
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
        """Context manager of an event that is set when this request's client leaves."""
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
    """Context manager that runs `work` beside the block, and cancels it at the end of the block."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager that turns garbage collection off and raises the priority where this user may: neither this
    process nor servers that take every core must delay the clock that measures them. Start servers outside of it, as
    they would inherit the priority."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, usual - PRIORITY_GAIN)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, usual)


async def watch_own_lag(lags: list[float]) -> None:
    """Append this event loop's lateness to `lags` every 10 ms, in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(max(0.0, loop.time() - due))
