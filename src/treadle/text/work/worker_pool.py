"""The server's side of text work: a queue, a few workers, and the limits of each piece of work.

A piece of work has a bound of processor time, which follows from its size and from speeds measured at load, and a wider
one of elapsed time. Whatever breaks a bound costs its worker and nothing else: the piece ends with the client's error,
the worker is replaced, and the next piece goes on. A piece waits for a worker no longer than `max_wait_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
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
    from_code,
)
from ...processes import is_stopped
from ...units import duration
from ..packed_view import unpack
from ..view import TextView
from .fork_server_process import Channel, ForkServerProcess
from .messages import Done, Failed, Gone, Load, Order, Speeds, from_worker
from .queue import FairQueue

log = logging.getLogger(__name__)

LEAST_CPU_S = 1.0
"""Any piece may take this much processor time, and MARGIN times what its size should take beyond that."""
MARGIN = 25.0
ELAPSED_SLACK = 4.0
LEAST_ELAPSED_S = 6.0
LEAST_WAIT_S = 1.0
MOST_PENDING = 256
MOST_QUICK_DEATHS = 5
QUICK_S = 60.0
LONGEST_BACKOFF_S = 15.0
REPORT_S = 2.0  # for the fork server to say how a worker ended
ATTEMPTS = 2
MEAN_OVER = 10
FORK_SERVER = "the fork server"
"""Its name among the stages of `Tally.killed`."""
LOG_EVERY_S = 1.0


@dataclass(eq=False)
class WorkItem:
    """One piece of work, from its caller to its result."""

    order: Order
    payload: bytes
    tenant: str
    result: asyncio.Future[bytes]
    since: float
    expiry: asyncio.TimerHandle | None = None
    attempts: int = 0


@dataclass(eq=False)
class Member:
    """One worker."""

    number: int
    pid: int
    channel: Channel
    gone: asyncio.Future[Gone]
    piece: WorkItem | None = None


@dataclass
class Tally:
    """What is counted since the start. `mean_s` is the recent mean time that a piece of work takes."""

    done: int = 0
    refused: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    mean_s: float = 0.0


class WorkerPool:
    """The workers of one model. Everything here is on the event loop; `on_refused`, `on_killed` (with the stage's name)
    and `on_restart` are told for the metrics."""

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
        self.max_wait_s = max(LEAST_WAIT_S, max_wait_s)
        self.on_refused = on_refused
        self.on_killed = on_killed
        self.on_restart = on_restart
        self._clock = clock
        self._queue: FairQueue[WorkItem] = FairQueue()
        self._members: dict[int, Member] = {}
        self._idle: list[Member] = []
        self._numbers = 0
        self._server: ForkServerProcess | None = None
        self._order: Load | None = None
        self._view: TextView | None = None
        self._speeds = Speeds(1e6, 1e6, 0.0)
        self._away: TreadleError = EngineUnavailable("the model's tokenizer is still loading", retry_after_s=2.0)
        self._load_s = 1.0
        self._free_at = self._left_at = clock()
        self._logged_at = float("-inf")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._failure: asyncio.Event = asyncio.Event()
        self.reason = ""
        self.tally = Tally()

    # Life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the fork server, so that it is up when the model is known."""
        await self._started()

    async def _started(self) -> ForkServerProcess:
        if self._server is None:
            server = ForkServerProcess(self._on_gone)
            await server.start()
            self._server = server
        return self._server

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if server.hung:
            self.tally.killed[FORK_SERVER] += 1
            self.on_killed(FORK_SERVER)
        await server.close()

    async def load(self, order: Load, on_checked: Callable[[], None] = lambda: None) -> TextView:
        """Load a model and start the workers. `on_checked` is called once its folder has passed `order.check`. Raises
        ModelError or ConfigError."""
        self._order = order
        await self._open(on_checked)
        self._spawn(self._supervise())
        assert self._view is not None
        return self._view

    async def _open(self, on_checked: Callable[[], None] = lambda: None) -> None:
        assert self._order is not None
        began = self._clock()
        try:
            server = await self._started()
            loaded = await server.load(self._order, on_checked)
            await asyncio.gather(*(self._enlist(server) for _ in range(self.workers)))
        except BaseException as error:
            await self._end_server()
            if isinstance(error, (OSError, EOFError)):
                raise ModelError(f"the text processes could not be started: {str(error) or 'they ended'}") from error
            raise
        self._view = self._view or unpack(loaded.view)
        self._speeds, self._load_s = loaded.speeds, self._clock() - began
        self.reason = ""
        self._feed()

    async def close(self) -> None:
        """End all processes. Who waits gets ServerStopping."""
        self._closed = True
        while len(self._queue):
            self._settle(self._queue.take(), ServerStopping("the server is shutting down"))
        for member in self._members.values():
            if member.piece is not None:
                self._settle(member.piece, ServerStopping("the server is shutting down"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in list(self._members.values()):
            member.channel.close()
        if self._server is not None:
            await self._server.close()

    async def failed(self) -> None:
        """Returns when the text processes can't be brought back; `reason` says why."""
        await self._failure.wait()

    @property
    def is_failed(self) -> bool:
        """Whether they were given up."""
        return self._failure.is_set()

    def view(self) -> TextView:
        """The model's text view. Raises EngineUnavailable while it loads, or loads again, or no worker can be had."""
        if self._view is None or self.reason:
            raise type(self._away)(self._away.message, retry_after_s=self._away.retry_after_s)
        if self._is_deserted:
            raise EngineUnavailable(self.trouble, retry_after_s=max(1.0, self._load_s))
        return self._view

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
    ) -> bytes:
        """The result of a job. `parsed` and `tokenized` are the bytes of JSON and of text that it reads, for its bound
        of processor time, which is `least_cpu_s` at least.

        Raises InvalidRequest for what breaks a bound, Busy where no worker comes free within `max_wait_s` or all
        MOST_PENDING places are taken (a tenant that holds the most gives its newest to others), ServerStopping, and the
        job's own errors.
        """
        if self._closed:
            raise ServerStopping("the server is shutting down")
        self._make_room(tenant)
        loop = asyncio.get_running_loop()
        order = Order(job, params, max(least_cpu_s, self.cpu_bound_s(parsed, tokenized)))
        piece = WorkItem(order, payload, tenant, loop.create_future(), self._clock())
        piece.expiry = loop.call_later(self.max_wait_s, self._expire, piece)
        self._queue.put(tenant, piece)
        self._feed()
        try:
            return await piece.result
        finally:
            piece.expiry.cancel()
            self._queue.remove(tenant, piece)

    def _make_room(self, tenant: str) -> None:
        """Where all places are taken, let the tenant with the most give way. Raises Busy where that is `tenant`."""
        if len(self._queue) < MOST_PENDING:
            return
        why = "too many prompts wait to be tokenized"
        displaced = self._queue.displace(tenant)
        if displaced is None:
            raise self._busy(why)
        self._settle(displaced, self._busy(why))

    def cpu_bound_s(self, parsed: int, tokenized: int) -> float:
        """The processor time that a piece may take: a floor, and a generous multiple of what its size should take."""
        speeds = self._speeds
        text_s = tokenized / speeds.tokenize_bytes + speeds.render_s * (1 + tokenized / 100)
        return LEAST_CPU_S + MARGIN * (parsed / speeds.parse_bytes + text_s)

    def _feed(self) -> None:
        """Give waiting pieces to idle workers."""
        while self._idle and len(self._queue):
            piece, member = self._queue.take(), self._idle.pop()
            if piece.result.done():
                self._idle.append(member)
                continue
            self._free_at = self._clock()
            assert piece.expiry is not None
            piece.expiry.cancel()
            member.piece = piece
            self._spawn(self._do(member, piece))

    async def _do(self, member: Member, piece: WorkItem) -> None:
        began = self._clock()
        piece.attempts += 1
        try:
            async with asyncio.timeout(_elapsed_bound_s(piece)):
                await member.channel.write(piece.order, piece.payload)
                message, payload = await member.channel.read(from_worker)
        except TimeoutError:
            late = not is_stopped(member.pid)  # by a signal from outside
            self._kill(member)
            await self._lost(member, piece, late=late)
            return
        except (EOFError, OSError, msgspec.MsgspecError):
            self._kill(member)
            await self._lost(member, piece, late=False)
            return
        self._note(self._clock() - began)
        if isinstance(message, Done):
            self._settle(piece, payload)
        else:
            self._settle(piece, _error_of(message))
        self._free(member, message.last)

    def _free(self, member: Member, last: bool) -> None:
        self._free_at = self._clock()
        member.piece = None
        if last:
            self._dismiss(member)
            self._spawn(self._replace())
        elif member.number in self._members:
            self._idle.append(member)
            self._feed()

    async def _lost(self, member: Member, piece: WorkItem, *, late: bool) -> None:
        """A worker ended with its piece: the piece is at fault, unless somebody else ended the worker."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(member.gone), REPORT_S)
        gone = member.gone.result() if member.gone.done() else None
        self._dismiss(member)
        innocent = not late and (gone is None or gone.signal in (0, signal.SIGKILL, signal.SIGTERM))
        if innocent and piece.attempts < ATTEMPTS:
            self._again(piece)
        else:
            self._blame(piece, gone, late)
        await self._replace()

    def _again(self, piece: WorkItem) -> None:
        if piece.result.done():
            return
        loop = asyncio.get_running_loop()
        piece.expiry = loop.call_later(self.max_wait_s, self._expire, piece)
        self._queue.put_back(piece.tenant, piece)
        self._feed()

    def _blame(self, piece: WorkItem, gone: Gone | None, late: bool) -> None:
        stage = (gone.stage if gone else "") or "text work"
        if late:
            how = f"took more than {_elapsed_bound_s(piece):.1f} s on this request"
        elif gone is not None and gone.signal == signal.SIGPROF:
            how = f"took more than {piece.order.cpu_s:.1f} s of processor time on this request"
        else:
            how = "crashed on this request"
        self.tally.killed[stage] += 1
        self.on_killed(stage)
        self._warn(
            f"{stage} {how}, which got 400; its process was replaced; if ordinary requests do this, use another "
            "template or model"
        )
        self._settle(piece, InvalidRequest(f"{stage} {how}: send fewer or shorter messages"))

    def _warn(self, what: str) -> None:
        if self._clock() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._clock()
            log.warning("%s (since the start: %d)", what, sum(self.tally.killed.values()))

    def _settle(self, piece: WorkItem, outcome: bytes | TreadleError) -> None:
        if piece.result.done():
            return
        if isinstance(outcome, TreadleError):
            piece.result.set_exception(outcome)
        else:
            piece.result.set_result(outcome)

    def _expire(self, piece: WorkItem) -> None:
        if self._queue.remove(piece.tenant, piece):
            self._settle(piece, self._busy(f"no text worker came free within {self.max_wait_s:g} s"))

    def _busy(self, why: str) -> Busy:
        self.tally.refused += 1
        self.on_refused()
        pending = len(self._queue) + len(self._members) - len(self._idle)
        wait_s = max(1.0, pending * self.tally.mean_s / self.workers, self.blocked_s if pending else 0.0)
        return Busy(f"the server is busy: {why}; try again in about {duration(wait_s)}", retry_after_s=wait_s)

    def _note(self, spent_s: float) -> None:
        self.tally.done += 1
        self.tally.mean_s += (spent_s - self.tally.mean_s) / min(self.tally.done, MEAN_OVER)

    # Workers ---------------------------------------------------------------------------------------------------

    async def _enlist(self, server: ForkServerProcess) -> None:
        self._numbers += 1
        number = self._numbers
        pid, channel = await server.fork(number)
        member = Member(number, pid, channel, asyncio.get_running_loop().create_future())
        self._members[number] = member
        self._idle.append(member)
        self._free_at = self._clock()
        self._feed()

    async def _replace(self) -> None:
        """Bring the crew to its number again, unless the fork server has gone: then it comes with the next."""
        backoff_s, server = 0.05, self._server
        while not self._closed and server is not None and server is self._server and len(self._members) < self.workers:
            try:
                await self._enlist(server)
            except (OSError, EOFError):
                if server.ended.is_set():
                    return
                await asyncio.sleep(backoff_s)
                backoff_s = min(5.0, 2 * backoff_s)

    def _kill(self, member: Member) -> None:
        if self._server is not None:
            self._server.kill_worker(member.number)

    def _dismiss(self, member: Member) -> None:
        self._members.pop(member.number, None)
        self._left_at = self._clock()
        member.channel.close()
        if member in self._idle:
            self._free_at = self._clock()
            self._idle.remove(member)

    def _on_gone(self, gone: Gone) -> None:
        member = self._members.get(gone.number)
        if member is None:
            return
        if not member.gone.done():
            member.gone.set_result(gone)
        if member.piece is None:  # it ended while it was idle
            self._dismiss(member)
            self._spawn(self._replace())

    async def _supervise(self) -> None:
        """Start the fork server again whenever it ends; give up after several quick ends in a row."""
        deaths = 0
        while not self._closed:
            assert self._server is not None
            began = self._clock()
            await self._server.ended.wait()
            deaths = deaths + 1 if self._clock() - began < QUICK_S else 1
            while deaths <= MOST_QUICK_DEATHS and not await self._restarted(deaths):
                deaths += 1
            if deaths > MOST_QUICK_DEATHS:
                self.reason = (
                    f"the text processes ended again after {MOST_QUICK_DEATHS} restarts in a row, and are given up"
                )
                self._away = EngineUnavailable(self.reason)
                self._failure.set()
                return

    async def _restarted(self, deaths: int) -> bool:
        backoff_s = min(LONGEST_BACKOFF_S, 0.5 * (2.0 ** (deaths - 1)) - 0.5)
        self.tally.restarts += 1
        self.on_restart()
        self.reason = "the text processes ended and are started again"
        self._away = EngineUnavailable(self.reason, retry_after_s=max(1.0, backoff_s + self._load_s))
        how = "ended" if self._server is None else self._server.ending
        again = f"starting it again in {backoff_s:.1f} s (restart {self.tally.restarts})"
        log.warning(
            "the text fork server %s; %s; new requests get 503 until it is back, running answers go on", how, again
        )
        for member in list(self._members.values()):
            if not member.gone.done():
                member.gone.set_result(Gone(member.number, signal.SIGKILL, ""))
            if member.piece is None:
                self._dismiss(member)
        await self._end_server()
        await asyncio.sleep(backoff_s)
        try:
            await self._open()
        except (ModelError, ConfigError) as error:
            log.warning("the text processes did not start: %s", error.message)
            return False
        return True

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("text work failed in the server", exc_info=task.exception())

    # What it says of itself ------------------------------------------------------------------------------------

    @property
    def blocked_s(self) -> float:
        """For how long no worker could take work."""
        return 0.0 if self._idle else max(0.0, self._clock() - self._free_at)

    @property
    def _is_deserted(self) -> bool:
        """There is no worker, and no new one for longer than replacing one takes."""
        return not self._members and self._clock() - self._left_at > LEAST_WAIT_S

    @property
    def trouble(self) -> str:
        """Why no text work can be done now; empty while some can."""
        if self._view is None or self.reason:
            return self.reason or self._away.message
        if self._is_deserted:
            return f"no text worker runs, and none was started for {self._clock() - self._left_at:.1f} s"
        if self.blocked_s > self.max_wait_s:
            return f"no text worker has been free for {self.blocked_s:.1f} s"
        return ""

    def statistics(self) -> dict[str, Any]:
        """Plain values for `/v1/status`."""
        tally = self.tally
        return {
            "workers": len(self._members),
            "idle": len(self._idle),
            "pending": len(self._queue) + len(self._members) - len(self._idle),
            "blocked_s": round(self.blocked_s, 3),
            "done": tally.done,
            "refused": tally.refused,
            "killed": dict(tally.killed),
            "restarts": tally.restarts,
            "mean_s": round(tally.mean_s, 6),
            "load_s": round(self._load_s, 3),
            "pid": None if self._server is None else self._server.pid,
            "worker_pids": [member.pid for member in self._members.values()],
        }


def _error_of(message: Failed) -> TreadleError:
    error = from_code(message.code, message.message)
    error.param = message.param
    return error


def _elapsed_bound_s(piece: WorkItem) -> float:
    return max(LEAST_ELAPSED_S, ELAPSED_SLACK * piece.order.cpu_s)
