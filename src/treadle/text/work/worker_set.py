"""Set of the running workers: busy and idle ones, and since when none was free or none was left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from .fork_server_process import ForkServerProcess
from .work_item import WorkerHandle, WorkItem


class WorkerSet:
    """Workers by number. Times are in seconds of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[int, WorkerHandle] = {}
        self._idle: list[WorkerHandle] = []
        self._numbers = 0
        self._starting = 0
        self._free_at = self._removed_at = clock()

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(list(self._workers.values()))

    @property
    def running_or_starting(self) -> int:
        """Number of workers, with those that are being forked."""
        return len(self._workers) + self._starting

    @property
    def idle(self) -> int:
        """Number of idle workers."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """Number of workers with an item."""
        return len(self._workers) - len(self._idle)

    @property
    def blocked_s(self) -> float:
        """Seconds since the last worker was idle; 0 while one is."""
        return 0.0 if self._idle else max(0.0, self._clock() - self._free_at)

    @property
    def empty_s(self) -> float:
        """Seconds since the last worker was removed; 0 while one runs."""
        return 0.0 if self._workers else self._clock() - self._removed_at

    def get(self, number: int) -> WorkerHandle | None:
        """Return worker `number`; None once it was removed."""
        return self._workers.get(number)

    async def fork(self, server: ForkServerProcess) -> None:
        """Add a new idle worker. Raises OSError or EOFError when the fork server can't fork."""
        self._numbers += 1
        number = self._numbers
        self._starting += 1
        try:
            pid, channel = await server.fork(number)
        finally:
            self._starting -= 1
        worker = WorkerHandle(number, pid, channel, asyncio.get_running_loop().create_future())
        self._workers[number] = worker
        self._idle.append(worker)
        self._free_at = self._clock()

    def assign(self, item: WorkItem) -> WorkerHandle:
        """Give an item to an idle worker."""
        worker = self._idle.pop()
        self._free_at = self._clock()
        worker.item = item
        return worker

    def release(self, worker: WorkerHandle) -> None:
        """Mark a worker as idle, unless it was removed."""
        self._free_at = self._clock()
        worker.item = None
        if worker.number in self._workers:
            self._idle.append(worker)

    def remove(self, worker: WorkerHandle) -> None:
        """Remove a worker and close its socket, at which it exits."""
        self._workers.pop(worker.number, None)
        self._removed_at = self._clock()
        worker.channel.close()
        if worker in self._idle:
            self._free_at = self._clock()
            self._idle.remove(worker)
