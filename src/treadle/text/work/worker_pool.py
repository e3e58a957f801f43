"""Worker pool for text work: a queue, worker processes, and limits for each call of a job.

Each item has a limit of processor time, derived from its size and from speeds measured at load, and a wider limit of
elapsed time. An item that breaks a limit costs its worker: the item fails with InvalidRequest, the worker is replaced,
and the next item runs. An item waits for a worker for at most `max_wait_s` seconds. Items that check a grammar for the
first time leave one worker to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import (
    Busy,
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    ModelError,
    ServerStopping,
    TreadleError,
)
from ...outage import Outage
from ...processes import is_stopped
from ...units import duration
from ..packed_view import unpack
from ..text_view import TextView
from .background_tasks import BackgroundTasks
from .checked_grammars import CheckedGrammars
from .fault_log import FaultLog
from .fork_server_process import FORK_S, ForkServerProcess
from .item_queue import ItemQueue
from .messages import Done, Exited, Failed, Load, Order, Speeds, from_worker
from .stages import COMPILING, STAGES, refusal
from .work_item import Counters, WorkerHandle, WorkItem, cpu_limit_s, error_from
from .worker_log import WorkerLog
from .worker_set import WorkerSet

log = logging.getLogger(__name__)

MIN_WAIT_S = 1.0
MAX_QUICK_DEATHS = 5
QUICK_S = 60.0
MAX_BACKOFF_S = 15.0
REPORT_S = 2.0  # for the fork server to report how a worker exited
MAX_ATTEMPTS = 2
LOADING = "the model's tokenizer is still loading"
FORK_SERVER = "the fork server"
"""Stage name of the fork server in `Counters.killed`."""


class WorkerPool:
    """Text workers of one model. Runs on the event loop.

    `on_refused`, `on_killed` (with the stage's name) and `on_restart` are called for the metrics.
    """

    def __init__(
        self,
        *,
        workers: int,
        max_wait_s: float,
        on_refused: Callable[[], None] = lambda: None,
        on_killed: Callable[[str], None] = lambda stage: None,
        on_restart: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers = workers
        self.max_wait_s = max(MIN_WAIT_S, max_wait_s)
        self.on_refused = on_refused
        self.on_killed = on_killed
        self.on_restart = on_restart
        self._clock = clock
        self._queue: ItemQueue[WorkItem] = ItemQueue(self.max_wait_s, self._busy)
        self._workers = WorkerSet(clock)
        self._grammars = CheckedGrammars(clock)
        self._server: ForkServerProcess | None = None
        self._load_order: Load | None = None
        self._view: TextView | None = None
        self._speeds = Speeds(1e6, 1e6, 0.0)
        self._outage = Outage(clock)
        self._load_s = 1.0
        self._faults = FaultLog(clock)
        self._log = WorkerLog(clock)
        self._tasks = BackgroundTasks()
        self._closed = False
        self._failure: asyncio.Event = asyncio.Event()
        self.reason = ""
        self.counters = Counters()

    # Life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the fork server ahead of `load`, while the model is still being resolved."""
        await self._ensure_server()

    async def _ensure_server(self) -> ForkServerProcess:
        if self._server is None:
            server = ForkServerProcess(self._on_exit)
            await server.start()
            self._server = server
        return self._server

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if server.hung:
            self.counters.killed[FORK_SERVER] += 1
            self.on_killed(FORK_SERVER)
        await server.close()

    async def load(self, order: Load, on_checked: Callable[[], None] = lambda: None) -> TextView:
        """Load a model and start the workers. `on_checked` is called once the folder has passed `order.check`. Raises
        ModelError or ConfigError."""
        self._load_order = order
        await self._load(on_checked)
        self._tasks.spawn(self._supervise())
        assert self._view is not None
        return self._view

    async def _load(self, on_checked: Callable[[], None] = lambda: None) -> None:
        assert self._load_order is not None
        began = self._clock()
        try:
            server = await self._ensure_server()
            loaded = await server.load(self._load_order, on_checked)
            await asyncio.gather(*(self._add_worker(server) for _ in range(self.workers)))
        except BaseException as error:
            await self._end_server()
            if isinstance(error, (OSError, EOFError)):
                raise ModelError(f"the text processes could not be started: {str(error) or 'they ended'}") from error
            raise
        self._view = self._view or unpack(loaded.view)
        self._speeds, self._load_s = loaded.speeds, self._clock() - began
        self.reason = ""
        self._dispatch()

    async def close(self) -> None:
        """End all processes. Queued and running items fail with ServerStopping."""
        self._closed = True
        while len(self._queue):
            self._queue.take().resolve(ServerStopping("the server is shutting down"))
        for worker in self._workers:
            if worker.item is not None:
                worker.item.resolve(ServerStopping("the server is shutting down"))
        await self._tasks.cancel()
        for worker in self._workers:
            worker.channel.close()
        if self._server is not None:
            await self._server.close()

    async def failed(self) -> None:
        """Wait until the fork server is given up after repeated failures; see `reason`."""
        await self._failure.wait()

    @property
    def is_failed(self) -> bool:
        """Whether the fork server was given up."""
        return self._failure.is_set()

    def view(self) -> TextView:
        """Return the model's text view. Raises EngineUnavailable while it loads or reloads, or when no worker runs."""
        if self._view is None or self._is_away:
            back_s = None if self.is_failed else self._outage.left_s()
            raise EngineUnavailable(self.unavailable_reason, retry_after_s=back_s)
        return self._view

    @property
    def is_restarting(self) -> bool:
        """Whether the model was loaded, and no work can be done until processes are started again."""
        return self._view is not None and self._is_away

    # Work ------------------------------------------------------------------------------------------------------

    async def run(
        self,
        job: str,
        params: bytes,
        payload: bytes = b"",
        *,
        tenant: str = "",
        parsed: int = 0,
        tokenized: int = 0,
        least_cpu_s: float = 0.0,
        grammar: bytes = b"",
    ) -> bytes:
        """Run a job in a worker and return its result. `parsed` and `tokenized` are the bytes of JSON and of text that
        it reads; they give its limit of processor time, which is at least `least_cpu_s` seconds. `grammar` is the
        digest of the grammar that it checks.

        Raises InvalidRequest when the job breaks a limit, or when its grammar has broken one before, Busy when no
        worker comes free within `max_wait_s` or the queue is full (see `ItemQueue.put`), ServerStopping, and the job's
        own errors.
        """
        if self._closed:
            raise ServerStopping("the server is shutting down")
        if (refused := self._grammars.refusal(grammar)) is not None:
            raise refused
        order = Order(job, params, max(least_cpu_s, cpu_limit_s(self._speeds, parsed, tokenized)))
        result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        item = WorkItem(order=order, payload=payload, tenant=tenant, result=result, grammar=grammar)
        self._queue.put(item)
        self._dispatch()
        try:
            return await result
        finally:
            self._queue.remove(item)

    def _dispatch(self) -> None:
        """Assign queued items to idle workers."""
        while self._workers.idle:
            try:
                item = self._queue.take(self._may_run)
            except IndexError:
                return
            if (refused := self._grammars.refusal(item.grammar)) is not None:
                item.resolve(refused)
            if not item.result.done():
                item.explores = self._grammars.is_new(item.grammar)
                self._tasks.spawn(self._run_item(self._workers.assign(item), item))

    def _may_run(self, item: WorkItem) -> bool:
        """Whether an item leaves a worker to those without a new grammar, or has none itself."""
        if not self._grammars.is_new(item.grammar):
            return True
        exploring = sum(worker.item is not None and worker.item.explores for worker in self._workers)
        return exploring < max(1, self.workers - 1)

    async def _run_item(self, worker: WorkerHandle, item: WorkItem) -> None:
        began = self._clock()
        item.attempts += 1
        try:
            async with asyncio.timeout(item.elapsed_limit_s):
                await worker.channel.write(item.order, item.payload)
                message, payload = await worker.channel.read(from_worker)
        except TimeoutError:
            late = not is_stopped(worker.pid)  # by a signal from outside
            self._kill(worker)
            await self._on_worker_lost(worker, item, late=late)
            return
        except (EOFError, OSError, msgspec.MsgspecError):
            self._kill(worker)
            await self._on_worker_lost(worker, item, late=False)
            return
        self.counters.record(self._clock() - began)
        if message.log is not None:
            self._log.write(message.log)
        if isinstance(message, Done):
            if message.compiled:
                self._grammars.passed(item.grammar)
            item.resolve(payload)
        else:
            item.resolve(self._reported(message, item))
        self._release(worker, message.last)

    def _release(self, worker: WorkerHandle, last: bool) -> None:
        self._workers.release(worker)
        if last:
            self._workers.remove(worker)
            self._tasks.spawn(self._refill())
        else:
            self._dispatch()

    async def _on_worker_lost(self, worker: WorkerHandle, item: WorkItem, *, late: bool) -> None:
        """Retry the item if its worker was ended from outside; otherwise fail it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(worker.exited), REPORT_S)
        exited = worker.exited.result() if worker.exited.done() else None
        self._workers.remove(worker)
        external = not late and (exited is None or exited.signal in (0, signal.SIGKILL, signal.SIGTERM))
        if external and item.attempts < MAX_ATTEMPTS:
            self._queue.put_back(item)
            self._dispatch()
        else:
            self._fail(item, exited, late)
            self._dispatch()
        await self._refill()

    def _fail(self, item: WorkItem, exited: Exited | None, late: bool) -> None:
        stage = (exited.stage if exited else "") or "text work"
        how = item.failure(exited, late)
        self.counters.killed[stage] += 1
        self.on_killed(stage)
        error = InvalidRequest(refusal(stage, how))
        self._faults.warn(f"{stage} {how}", error, f" (since the start: {sum(self.counters.killed.values())})")
        if stage == STAGES[COMPILING] and not late:
            self._grammars.broke_a_limit(item.grammar, error.message)
        item.resolve(error)

    def _reported(self, message: Failed, item: WorkItem) -> TreadleError:
        """Return the error that a worker reports; log it unless the job refused the request itself."""
        error = error_from(message)
        if message.fault:
            self._faults.warn(message.fault, error)
            if isinstance(error, InvalidRequest) and message.fault.startswith(STAGES[COMPILING]):
                self._grammars.broke_a_limit(item.grammar, error.message)
        return error

    def _busy(self, why: str) -> Busy:
        self.counters.refused += 1
        self.on_refused()
        pending = self._pending
        wait_s = max(1.0, pending * self.counters.mean_s / self.workers, self.blocked_s if pending else 0.0)
        if self.is_restarting:
            wait_s = self._outage.left_s()
        return Busy(f"the server is busy: {why}; try again in about {duration(wait_s)}", retry_after_s=wait_s)

    # Workers ---------------------------------------------------------------------------------------------------

    async def _add_worker(self, server: ForkServerProcess) -> None:
        await self._workers.fork(server)
        self._dispatch()

    async def _refill(self) -> None:
        """Fork workers until there are `workers` again. If the fork server has ended, its restart does that."""
        backoff_s, server = 0.05, self._server
        if server is not None and server.loaded and not len(self._workers):
            self._outage.expect(FORK_S + self._load_s)  # where the fork server hangs; else it is over at once
        while not self._closed and server is not None and server is self._server and server.loaded:
            if self._workers.running_or_starting >= self.workers:
                return
            try:
                await self._add_worker(server)
            except (OSError, EOFError):
                if server.ended.is_set():
                    return
                await asyncio.sleep(backoff_s)
                backoff_s = min(5.0, 2 * backoff_s)

    def _kill(self, worker: WorkerHandle) -> None:
        if self._server is not None:
            self._server.kill_worker(worker.number)

    def _on_exit(self, exited: Exited) -> None:
        worker = self._workers.get(exited.number)
        if worker is None:
            return
        if not worker.exited.done():
            worker.exited.set_result(exited)
        if worker.item is None:  # it was idle
            self._workers.remove(worker)
            self._tasks.spawn(self._refill())

    async def _supervise(self) -> None:
        """Restart the fork server whenever it ends; give up after MAX_QUICK_DEATHS quick ends in a row."""
        deaths = 0
        while not self._closed:
            assert self._server is not None
            began = self._clock()
            await self._server.ended.wait()
            deaths = deaths + 1 if self._clock() - began < QUICK_S else 1
            while deaths <= MAX_QUICK_DEATHS and not await self._restart(deaths):
                deaths += 1
            if deaths > MAX_QUICK_DEATHS:
                self.reason = (
                    f"the text processes ended again after {MAX_QUICK_DEATHS} restarts in a row, and are given up"
                )
                self._failure.set()
                return

    async def _restart(self, deaths: int) -> bool:
        backoff_s = min(MAX_BACKOFF_S, 0.5 * (2.0 ** (deaths - 1)) - 0.5)
        self.counters.restarts += 1
        self.on_restart()
        self.reason = "the text processes ended and are started again"
        self._outage.expect(backoff_s + self._load_s)
        how = "ended" if self._server is None else self._server.exit_reason
        again = f"starting it again in {backoff_s:.1f} s (restart {self.counters.restarts})"
        log.warning(
            "the text fork server %s; %s; new requests get 503 until it is back, running answers go on", how, again
        )
        for worker in self._workers:
            if not worker.exited.done():
                worker.exited.set_result(Exited(worker.number, signal.SIGKILL, ""))
            if worker.item is None:
                self._workers.remove(worker)
        await self._end_server()
        await asyncio.sleep(backoff_s)
        try:
            await self._load()
        except (ModelError, ConfigError) as error:
            log.warning("the text processes did not start: %s", error.message)
            return False
        return True

    # Status ----------------------------------------------------------------------------------------------------

    @property
    def blocked_s(self) -> float:
        """Seconds since the last worker was idle; 0 while one is."""
        return self._workers.blocked_s

    @property
    def _pending(self) -> int:
        return len(self._queue) + self._workers.busy

    @property
    def _is_away(self) -> bool:
        """Whether the fork server is started again, or was given up, or no worker runs."""
        return bool(self.reason) or self._has_no_workers

    @property
    def _has_no_workers(self) -> bool:
        """Whether no worker has run for longer than a replacement takes."""
        return self._workers.empty_s > MIN_WAIT_S

    @property
    def unavailable_reason(self) -> str:
        """The reason why no text work can be done now; "" while it can."""
        if self._view is None or self.reason:
            return self.reason or LOADING
        if self._has_no_workers:
            return f"no text worker runs, and none was started for {self._workers.empty_s:.1f} s"
        if self.blocked_s > self.max_wait_s:
            return f"no text worker has been free for {self.blocked_s:.1f} s"
        return ""

    def statistics(self) -> dict[str, Any]:
        """Return the pool's part of `/v1/status`."""
        counters = self.counters
        return {
            "workers": len(self._workers),
            "idle": self._workers.idle,
            "pending": self._pending,
            "blocked_s": round(self.blocked_s, 3),
            "done": counters.done,
            "refused": counters.refused,
            "killed": dict(counters.killed),
            "restarts": counters.restarts,
            "mean_s": round(counters.mean_s, 6),
            "load_s": round(self._load_s, 3),
            "pid": None if self._server is None else self._server.pid,
            "worker_pids": [worker.pid for worker in self._workers],
        }
