"""Image processes of one model: a bounded, fair queue of images, and processes that start with the first of them.

An image that breaks a limit or crashes its process is refused, and the process is replaced with the next image. One
that was ended from outside prepares its image again, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from .. import shared_memory
from ..errors import Busy, EngineUnavailable, InvalidRequest, ServerStopping, TreadleError, from_code
from ..text.images import AnySettings
from ..text.work.background_tasks import BackgroundTasks
from ..text.work.fault_log import LimitedLog
from ..text.work.work_item import Counters
from ..units import duration
from .messages import FULL, Prepare, Prepared, Refused, Start
from .pixels_memory import NoRoom, Pixels
from .process import ImageProcess, Lost
from .queue import ImageItem, ImageQueue

log = logging.getLogger(__name__)

MOST_PIXELS = 1 << 26
MEMORY_BYTES = 3 << 30
CPU_S = 10.0
LIMIT_S = 30.0
MIN_WAIT_S = 1.0
MAX_ATTEMPTS = 2
NO_MEMORY = (
    "the shared memory of this machine has no room for an image ({}): send smaller or fewer images (a container gets "
    "more of it with --shm-size)"
)


def image_workers() -> int:
    """Return the number of image processes: an image takes tens of milliseconds, and a process 60 MB."""
    return min(4, max(1, (os.cpu_count() or 1) // 4))


class ImageWorkers:
    """Image processes of one model, `most` at a time. Runs on the event loop. `on_refused` and `on_killed` are called
    for the metrics; `make` makes a process."""

    def __init__(
        self,
        settings: AnySettings,
        *,
        most: int = 1,
        max_wait_s: float = 4.0,
        limit_s: float = LIMIT_S,
        cpu_s: float = CPU_S,
        on_refused: Callable[[], None] = lambda: None,
        on_killed: Callable[[], None] = lambda: None,
        make: Callable[[Start, float], ImageProcess] = ImageProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self._start = Start(settings, MOST_PIXELS, MEMORY_BYTES, cpu_s)
        self._limit_s = limit_s
        self._on_refused = on_refused
        self._on_killed = on_killed
        self._make = make
        self._clock = clock
        self._at_work: dict[ImageItem, float] = {}  # with the time at which a process was given to it
        self._queue = ImageQueue(
            max(MIN_WAIT_S, max_wait_s), limit_s, self._busy, lambda: {item.tenant for item in self._at_work}
        )
        self._idle: list[ImageProcess] = []
        self._processes: set[ImageProcess] = set()
        self._tasks = BackgroundTasks()
        self._owner: shared_memory.Owner | None = None
        self._log = LimitedLog(clock, log)
        self._closed = False
        self.counters = Counters()

    async def prepare(
        self, data: bytes, media_type: str = "", *, low: bool = False, most_bytes: int = 1 << 62, tenant: str = ""
    ) -> Pixels:
        """Make the pixels of an image. The caller owns the shared memory, and removes it.

        Raises InvalidRequest for an image that can't be used, Busy where no process comes free in time, NoRoom where
        the machine has no shared memory, EngineUnavailable where no process can be started, and ServerStopping.
        """
        if self._closed:
            raise ServerStopping("the server is shutting down")
        name = self._new_name()
        order = Prepare(name, media_type, low, most_bytes)
        item = ImageItem(order=order, data=data, tenant=tenant, result=asyncio.get_running_loop().create_future())
        self._queue.put(item)
        self._dispatch()
        try:
            prepared: Prepared = await item.result
        except BaseException:
            shared_memory.unlink(name)
            raise
        finally:
            self._queue.remove(item)
        return Pixels(name, prepared.shape, prepared.layout)

    async def close(self) -> None:
        """End all processes. Queued and running images fail with ServerStopping."""
        self._closed = True
        while len(self._queue):
            self._queue.take().resolve(ServerStopping("the server is shutting down"))
        await self._tasks.cancel()
        for process in list(self._processes):
            await self._end(process)
        if self._owner is not None:
            self._owner.close()

    def _new_name(self) -> str:
        try:
            self._owner = self._owner or shared_memory.Owner()
        except OSError as error:
            raise self._no_memory(str(error.strerror)) from error
        return self._owner.new_name()

    def _dispatch(self) -> None:
        """Give queued images to processes, of which each has one at a time."""
        while len(self._queue) and len(self._at_work) < self.most:
            item = self._queue.take()
            if not item.result.done():
                self._at_work[item] = self._clock()
                self._tasks.spawn(self._run(item))

    async def _run(self, item: ImageItem) -> None:
        try:
            item.resolve(await self._outcome(item))
        except asyncio.CancelledError:
            item.resolve(ServerStopping("the server is shutting down"))
            raise
        finally:
            if item.result.cancelled() or not item.result.done():
                shared_memory.unlink(item.order.name)  # its caller has left
            del self._at_work[item]
            if not self._closed:
                self._dispatch()

    async def _outcome(self, item: ImageItem) -> Prepared | TreadleError:
        """Prepare an image, again where its process was ended from outside."""
        lost = Lost("crashed", outside=True)
        while item.attempts < MAX_ATTEMPTS and lost.outside:
            item.attempts += 1
            try:
                process = await self._process()
            except OSError as error:
                self._log.write("no image process could be started (%s); images get 503 until one can", error)
                return EngineUnavailable(f"no image process could be started: {error}", retry_after_s=2.0)
            began = self._clock()
            try:
                message = await process.prepare(item.order, item.data)
            except Lost as error:
                lost = error
                await self._end(process)
                shared_memory.unlink(item.order.name)
                continue
            except BaseException:
                await self._end(process)
                raise
            self._idle.append(process)
            self.counters.record(self._clock() - began)
            return self._error_of(message) if isinstance(message, Refused) else message
        return self._fault(lost)

    async def _process(self) -> ImageProcess:
        """Return an idle process, or a new one. Those that have ended meanwhile have begun no image: they count as no
        attempt. Raises OSError."""
        while self._idle:
            process = self._idle.pop()
            if not process.ended:
                return process
            await self._end(process)
        process = self._make(self._start, self._limit_s)
        self._processes.add(process)
        try:
            await process.start()
        except BaseException:
            self._processes.discard(process)
            raise
        return process

    async def _end(self, process: ImageProcess) -> None:
        self._processes.discard(process)
        with contextlib.suppress(ValueError):
            self._idle.remove(process)
        await process.close()

    def _fault(self, lost: Lost) -> InvalidRequest:
        self.counters.killed[lost.how] += 1
        self._on_killed()
        self._log.write("the image process %s on an image, which got 400; the next image gets a new process", lost.how)
        return InvalidRequest(f"the image process {lost.how} on this image: send another")

    def _error_of(self, message: Refused) -> TreadleError:
        if message.code == FULL:
            return self._no_memory(message.message)
        return from_code(message.code, message.message)

    def _no_memory(self, why: str) -> NoRoom:
        return NoRoom(f"the server is busy: {NO_MEMORY.format(why)}", retry_after_s=self._wait_s())

    def _busy(self, why: str) -> Busy:
        self.counters.refused += 1
        self._on_refused()
        wait_s = self._wait_s()
        return Busy(f"the server is busy: {why}; try again in about {duration(wait_s)}", retry_after_s=wait_s)

    def _wait_s(self) -> float:
        return max(1.0, self._pending * self.counters.mean_s / self.most, self._free_in_s())

    def _free_in_s(self) -> float:
        """Return the seconds until a process is expected to come free: an image takes as long again as it has taken,
        and no longer than it may."""
        if len(self._at_work) < self.most:
            return 0.0
        now = self._clock()
        return min(min(now - began, self._limit_s - (now - began)) for began in self._at_work.values())

    @property
    def _pending(self) -> int:
        return len(self._queue) + len(self._at_work)

    def statistics(self) -> dict[str, Any]:
        """Return plain values for `/v1/status`."""
        counters = self.counters
        pids = [process.pid for process in self._processes if not process.ended]
        return {
            "processes": len(pids),
            "pids": pids,
            "pending": self._pending,
            "done": counters.done,
            "refused": counters.refused,
            "killed": dict(counters.killed),
            "mean_s": round(counters.mean_s, 6),
        }
