"""Keeps an owner alive: starts it, watches its steps, replaces it when it dies or hangs, and gives up honestly.

The states and what moves between them:

    STARTING -> READY            the owner said Ready
    STARTING -> FAILED           the very first start failed, or MAX_FAILED_STARTS restarts in a row
    READY -> RESTARTING          it ended, broke, or hung and was killed
    RESTARTING -> READY          the next owner said Ready
    READY, RESTARTING -> FAILED  it hung and can't be killed (a thread), or restarts failed
    any -> STOPPING -> STOPPED   `stop`

An owner is hung when work waits for it and it has told of no step for `hang_after_s`; while it starts, when it is
not ready within `start_timeout_s`. Where this process itself stood still (it was stopped, or its container frozen),
what the owner did meanwhile is not known, and its silence counts from the awakening.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ..core.messages import Capabilities, Failed, FromOwner, Loading, Ready, Stop, Stopped, ToOwner
from ..errors import EngineDied, EngineUnavailable, ServerStopping, StartFailed, TreadleError
from .handle import Launch, OwnerHandle

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
SETTLED_S = 60.0  # an owner that lived this long is not to blame for the next death's back-off
STOP_GRACE_S = 5.0
STOOD_STILL_S = 1.0  # a look that comes later than this, and by half of `hang_after_s`, says that we stood still
KILL_GRACE_S = 5.0


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Listener(Protocol):
    """Who hears of the engine's life. All calls come on the event loop."""

    def on_message(self, message: FromOwner) -> None: ...

    def on_ready(self, capabilities: Capabilities) -> None: ...

    def on_lost(self, running: TreadleError, waiting: TreadleError) -> None:
        """The engine is gone: what ran fails with `running`, what waits or comes with `waiting`."""
        ...

    def work_since(self) -> float | None:
        """When the engine was first owed an answer that it still owes, in this clock; None when it owes nothing."""
        ...


@dataclass(frozen=True)
class Patience:
    """Bounds in seconds."""

    hang_after_s: float = 30.0
    start_timeout_s: float = 1800.0


class Supervisor:
    def __init__(
        self, launch: Launch, listener: Listener, patience: Patience, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = EngineState.STARTING
        self.stage = "starting"
        self.reason = ""
        self.restarts = 0
        self.load_s = 0.0
        self.last_beat: float | None = None
        self.on_stage: Callable[[str], None] = lambda stage: None
        self._launch = launch
        self._listener = listener
        self._patience = patience
        self._clock = clock
        self._owner: OwnerHandle | None = None
        self._started = False  # the owner can be sent to
        self._ready_at: float | None = None
        self._failed_at: float | None = None
        self._awake = 0.0  # since when we have been watching without a break
        self._doubt = ""  # why the owner can't be trusted any more
        self._said = ""  # why the owner ended, in its own words
        self._plain = True  # and they hold no exception's text, which may name paths: clients may read them
        self._exit = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # Life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine; returns when it is ready. Raises StartFailed with the one reason why it is not."""
        self.begin()
        await self.ready()

    async def ready(self) -> None:
        """Returns when the engine is ready for the first time. Raises StartFailed with the one reason why it is not."""
        while self.state is EngineState.STARTING:
            await self._change()
        if self.state is not EngineState.READY:
            raise StartFailed(self.reason or "the engine was stopped before it was ready")

    def begin(self) -> None:
        """Start the engine and return at once."""
        self._task = asyncio.create_task(self._supervise(), name="treadle-supervisor")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the engine: it has `grace_s` to unwind, then it is killed. Idempotent."""
        if self.state not in (EngineState.FAILED, EngineState.STOPPING, EngineState.STOPPED):
            self._become(EngineState.STOPPING)
            self._listener.on_lost(ServerStopping("the server is stopping"), ServerStopping("the server is stopping"))
        if self._started:
            self.send(Stop())
            await self._gone(grace_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.state is not EngineState.FAILED:
            self._become(EngineState.STOPPED)

    def kill(self) -> None:
        """End the owner at once, for a process that is about to end itself."""
        if self._owner is not None:
            self._owner.kill()

    async def failed(self) -> str:
        """Returns the reason once the engine has failed for good."""
        while self.state is not EngineState.FAILED:
            await self._change()
        return self.reason

    def send(self, message: ToOwner) -> None:
        """Hand a message to the owner, if there is one."""
        if self._owner is not None:
            self._owner.send(message)

    @property
    def pid(self) -> int | None:
        return None if self._owner is None else self._owner.pid

    # One owner after the other -----------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        failed_starts = quick_deaths = 0
        while True:
            lived_s = await self._one_life()
            if self._over():
                return
            if lived_s is None:
                failed_starts += 1
                if self.state is EngineState.STARTING or failed_starts >= MAX_FAILED_STARTS:
                    self._fail(self._said)
                    return
            else:
                failed_starts = 0
                quick_deaths = 0 if lived_s > SETTLED_S else quick_deaths + 1
            self.restarts += 1
            self._become(EngineState.RESTARTING, self._said)
            backoff_s = BACKOFF_S[min(max(quick_deaths - 1, 0) + failed_starts, len(BACKOFF_S) - 1)]
            log.warning("engine lost (%s); restart %d in %.1f s", self._said, self.restarts, backoff_s)
            await asyncio.sleep(backoff_s)
            if self._over():
                return

    def _over(self) -> bool:
        return self.state in (EngineState.STOPPING, EngineState.FAILED)

    async def _one_life(self) -> float | None:
        """Start an owner and watch it to its end; how long it was ready, in seconds, or None if it never was."""
        self._exit.clear()
        self._said = self._doubt = ""
        self._plain = True
        self.last_beat = self._ready_at = self._failed_at = None
        began = self._awake = self._clock()
        await self._launch_owner()
        while not self._exit.is_set():
            if self.state is not EngineState.STOPPING and (why := self._overdue(began)):
                await self._put_down(why)
                break
            await self._tick()
        self._lost()
        return None if self._ready_at is None else self._clock() - self._ready_at

    async def _launch_owner(self) -> None:
        """Launch and start an owner. One that can't even be launched has ended."""
        self._started = False
        try:
            self._owner = self._launch()
            await self._owner.start(self._hear, self._ended)
            self._started = True
        except Exception as error:
            log.exception("the engine could not be launched")
            self._said, self._plain = f"the engine could not be launched: {error}", False
            self._exit.set()

    async def _tick(self) -> None:
        """Wait for a change, or until it is time to look at the owner's heartbeat again."""
        hang_after_s = self._patience.hang_after_s
        due = asyncio.get_running_loop().time() + min(1.0, hang_after_s / 4)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await self._change()
        if asyncio.get_running_loop().time() - due > max(STOOD_STILL_S, hang_after_s / 2):
            self._awake = self._clock()

    def _overdue(self, began: float) -> str:
        """Why this owner must be put down now; empty while it need not."""
        now = self._clock()
        if self._doubt:
            return self._doubt
        if self._failed_at is not None:
            return f"{self._said}; it did not end after that" if now - self._failed_at > KILL_GRACE_S else ""
        if self._ready_at is None:
            late = now - began > self._patience.start_timeout_s
            return f"not ready within {self._patience.start_timeout_s:g} s ({self.stage})" if late else ""
        since = self._listener.work_since()
        if since is None:
            return ""
        silent_s = now - max(since, self.last_beat or since, self._awake)
        return f"hung: no step for {silent_s:.1f} s while work waits" if silent_s > self._patience.hang_after_s else ""

    async def _put_down(self, why: str) -> None:
        """Answer for a hung owner and kill it; one that does not end even then is the end of the engine."""
        log.error("engine %s", why)
        self._said = why
        assert self._owner is not None
        killed = self._owner.kill()
        self._lost()
        if not await _ends(self._owner, KILL_GRACE_S):
            where = "its process does not end" if killed else "it runs on a thread, which can't be ended"
            self._fail(f"{why}; {where}: restart the server")

    async def _gone(self, grace_s: float) -> None:
        """Wait for the owner's end, and kill it when that takes too long."""
        assert self._owner is not None
        if not await _ends(self._owner, grace_s) and self._owner.kill():
            await _ends(self._owner, KILL_GRACE_S)

    # What the owner says -------------------------------------------------------------------------------------------

    def _hear(self, message: FromOwner) -> None:
        try:
            self._take_in(message)
        except Exception as error:
            log.exception("what the engine said could not be taken in")
            self._doubt, self._plain = f"said what could not be taken in ({type(error).__name__}: {error})", False
            self._changed.set()

    def _take_in(self, message: FromOwner) -> None:
        self.last_beat = self._clock()
        match message:
            case Loading(stage=stage):
                self.stage = stage
                self.on_stage(stage)
                self._changed.set()
            case Ready() if self.state in (EngineState.STARTING, EngineState.RESTARTING) and not self._said:
                self._ready_at = self.last_beat
                self.load_s = message.load_s
                self._become(EngineState.READY)
                self._listener.on_ready(message.capabilities)
            case Failed():
                self._said, self._failed_at, self._plain = message.message, self.last_beat, False
                self._lost()
                self._changed.set()
            case Ready() | Stopped():
                self._changed.set()
            case _:
                self._listener.on_message(message)

    def _ended(self, how: str) -> None:
        self._said = self._said or f"the engine process ended: {how}"
        self._exit.set()
        self._changed.set()

    def _lost(self) -> None:
        if self.state is EngineState.READY:
            self._become(EngineState.RESTARTING, self._said)
        if self.state is EngineState.RESTARTING:
            wait_s, why = max(1.0, self.load_s), f" ({self._said})" if self._plain else ""
            self._listener.on_lost(
                EngineDied(f"the engine was lost while this request ran{why}; it is restarted"),
                EngineUnavailable(f"the engine is restarting{why}", retry_after_s=wait_s),
            )

    def _fail(self, reason: str) -> None:
        self._become(EngineState.FAILED, reason)
        log.error("the engine has failed for good: %s", reason)
        error = EngineUnavailable(f"the engine has failed for good: {reason if self._plain else 'see its log'}")
        self._listener.on_lost(EngineDied(error.message), error)

    # Changes of state ------------------------------------------------------------------------------------------------

    def _become(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self._changed.set()

    async def _change(self) -> None:
        """Returns after the next change. Several may wait: the event is replaced, never cleared under them."""
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()


async def _ends(owner: OwnerHandle, within_s: float) -> bool:
    """Whether `owner` ends within `within_s` seconds."""
    ended = asyncio.ensure_future(owner.ended())
    try:
        await asyncio.wait((ended,), timeout=within_s)
        return ended.done()
    finally:
        ended.cancel()
