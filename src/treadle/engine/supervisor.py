"""Supervision of the engine's owner: start, watch, replace when it dies or hangs, and give up.

The states and what moves between them:

    STARTING -> READY            the owner said Ready
    STARTING -> FAILED           the very first start failed
    READY -> RESTARTING          it ended, broke, or hung and was killed
    RESTARTING -> READY          the next owner said Ready
    READY, RESTARTING -> FAILED  it hung and can't be killed (a thread), MAX_FAILED_STARTS restarts in a row failed, or
                                 it died too often with nobody to blame (`deaths`)
    any -> STOPPING -> STOPPED   `stop`

The listener hears `on_death` once for each READY -> RESTARTING, and says how many deaths are explained now; then
`on_away`, again after each failed restart; then `on_ready`. `on_lost` is the last word: FAILED or STOPPING.

An owner is hung when `heartbeat` says so: work waits for it, or a ping, and it has told of nothing for `hang_after_s`.
While it starts or restarts, when it has told of no stage for the time that `Timeouts.load_s` gives. What an owner says
after it was given up is dropped: its rows are replayed from what was heard before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from enum import StrEnum

from ..core.messages import Failed, FromOwner, JobDone, Loading, Ping, Ready, StepReport, Stop, Stopped, ToOwner
from ..errors import EngineDied, EngineUnavailable, ServerStopping, StartFailed
from .deaths import Cause, Death, Deaths
from .engine_events import EngineEvents
from .handle import KILLED, Launch, OwnerHandle, ends
from .heartbeat import Heartbeat
from .timeouts import Outage, Timeouts

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
STOP_GRACE_S = 5.0
KILL_GRACE_S = 5.0
NOT_TOLD = "the server's log says why"  # of an end whose words are an exception's, which may name paths


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Supervisor:
    def __init__(
        self, launch: Launch, listener: EngineEvents, patience: Timeouts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = EngineState.STARTING
        self.stage = "starting"
        self.reason = ""  # for operators
        self.told = ""  # the same for clients
        self.restarts = 0
        self.load_s = 0.0
        self.deaths = Deaths()
        self.on_stage: Callable[[str], None] = lambda stage: None
        self._launch = launch
        self._listener = listener
        self._patience = patience
        self._clock = clock
        self._owner: OwnerHandle | None = None
        self._started = False  # the owner can be sent to
        self._heartbeat = Heartbeat(patience.hang_after_s, clock)
        self._ready_at: float | None = None
        self._failed_at: float | None = None
        self._began = self._stage_at = clock()
        self.outage = Outage(clock)
        self._failed_starts = 0
        self._cause = Cause.CRASH
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
        self._task = asyncio.create_task(self._watch(), name="treadle-supervisor")

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

    @property
    def last_beat(self) -> float | None:
        """When this owner was last heard."""
        return self._heartbeat.last

    def hang_left_s(self) -> float:
        """Seconds until an owner that says nothing will have been replaced, if it says nothing more."""
        since = self._heartbeat.silent_s(self._began)
        return max(1.0, self._patience.hang_after_s - since) + self.load_s

    # One owner after the other -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Supervise; a mistake in that is the end of the engine, and is not kept from those who wait for it."""
        try:
            await self._supervise()
        except Exception as error:
            log.exception("the engine's supervision failed")
            self.kill()
            self._plain = False
            self._fail(f"its supervision failed ({type(error).__name__}: {error})")

    async def _supervise(self) -> None:
        while True:
            was_ready = await self._one_life()
            if self._over():
                return
            if reason := self._hopeless(was_ready):
                self._fail(reason)
                return
            self.restarts += 1
            backoff_s = self._away()
            self._log_loss(was_ready, backoff_s)
            await asyncio.sleep(backoff_s)
            if self._over():
                return

    def _log_loss(self, was_ready: bool, backoff_s: float) -> None:
        again = f"starting it again in {backoff_s:.1f} s (restart {self.restarts})"
        if was_ready:
            effect = "running requests pause until then, new ones get 503"
            log.warning("engine lost (%s); %s; %s; %s", self._said, again, effect, self._cause.hint)
        else:
            log.warning("the engine did not start (%s); %s", self._said, again)

    def _over(self) -> bool:
        return self.state in (EngineState.STOPPING, EngineState.FAILED)

    def _hopeless(self, was_ready: bool) -> str:
        """Why there is no point in another start; empty while there is."""
        if was_ready:
            self._failed_starts = 0
            return self.deaths.loop(self._clock())
        self._failed_starts += 1
        first = self.state is EngineState.STARTING
        return self._said if first or self._failed_starts >= MAX_FAILED_STARTS else ""

    async def _one_life(self) -> bool:
        """Start an owner and watch it to its end; whether it was ever ready."""
        self._exit.clear()
        self._said = self._doubt = ""
        self._plain = True
        self._cause = Cause.CRASH
        self._ready_at = self._failed_at = None
        self._heartbeat.reset()
        self._began = self._stage_at = self._clock()
        await self._launch_owner()
        while not self._exit.is_set():
            if self.state is not EngineState.STOPPING and (why := self._overdue()):
                await self._put_down(why)
                break
            self._ping()
            await self._tick()
        self._lost()
        return self._ready_at is not None

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
        due = asyncio.get_running_loop().time() + min(1.0, self._patience.hang_after_s / 4)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await self._change()
        self._heartbeat.looked(asyncio.get_running_loop().time() - due)

    def _ping(self) -> None:
        """Ask an idle owner whether it lives. One that works says so by its steps."""
        idle = self.state is EngineState.READY and self._listener.work_since() is None
        if idle and self._heartbeat.wants_ping():
            self.send(Ping())

    def _overdue(self) -> str:
        """Why this owner must be put down now; empty while it need not."""
        if self._doubt:
            return self._doubt
        if self._failed_at is not None:
            late = self._clock() - self._failed_at > KILL_GRACE_S
            return f"{self._said}; it did not end after that" if late else ""
        if self._ready_at is None:
            within_s = self._patience.load_s(self.load_s if self.restarts else None)
            late = self._heartbeat.silent_s(self._stage_at) > within_s
            return f"not ready within {within_s:g} s ({self.stage})" if late else ""
        return self._hangs()

    def _hangs(self) -> str:
        since = self._listener.work_since()
        silent_s = 0.0 if since is None else self._heartbeat.silent_s(since)
        if silent_s > self._patience.hang_after_s:
            return self._hung(f"no step for {silent_s:.1f} s while work waits")
        if silent_s := self._heartbeat.deaf_s():
            return self._hung(f"no word for {silent_s:.1f} s, idle and asked for one")
        return ""

    def _hung(self, why: str) -> str:
        """Tell a hang from a process that was stopped from outside, for which no request is to blame."""
        assert self._owner is not None
        stopped = self._owner.stopped()
        self._cause = Cause.KILLED if stopped else Cause.HANG
        return f"hung: {why}" + ("; its process was stopped from outside (SIGSTOP, a debugger)" if stopped else "")

    async def _put_down(self, why: str) -> None:
        """Kill an owner that hangs or can't be trusted; one that does not end even then is the end of the engine."""
        log.error("killing the engine: %s", why)
        self._said = why
        assert self._owner is not None
        killed = self._owner.kill()
        self._lost()
        if not await ends(self._owner, KILL_GRACE_S):
            where = "its process does not end" if killed else "it runs on a thread, which can't be ended"
            self._fail(f"{why}; {where}: restart the server")

    async def _gone(self, grace_s: float) -> None:
        """Wait for the owner's end, and kill it when that takes too long."""
        assert self._owner is not None
        if not await ends(self._owner, grace_s) and self._owner.kill():
            await ends(self._owner, KILL_GRACE_S)

    # What the owner says -------------------------------------------------------------------------------------------

    def _hear(self, message: FromOwner) -> None:
        try:
            self._take_in(message)
        except Exception as error:
            log.exception("what the engine said could not be taken in")
            self._doubt, self._plain = f"said what could not be taken in ({type(error).__name__}: {error})", False
            self._changed.set()

    def _take_in(self, message: FromOwner) -> None:
        now = self._heartbeat.heard()
        match message:
            case Loading(stage=stage):
                self.stage, self._stage_at = stage, now
                self.on_stage(stage)
                self._changed.set()
            case Ready() if self.state in (EngineState.STARTING, EngineState.RESTARTING) and not self._said:
                self._ready_at = now
                self.load_s = max(message.load_s, now - self._began)
                self._become(EngineState.READY)
                self._listener.on_ready(message.capabilities)
            case Failed():
                self._said, self._failed_at, self._plain = message.message, now, False
                self._lost()
                self._changed.set()
            case Ready() | Stopped():
                self._changed.set()
            case StepReport() | JobDone() if self.state is EngineState.READY:
                self._listener.on_message(message)
            case _:
                log.debug("of no use any more, or a pong: %s", type(message).__name__)

    def _ended(self, how: str) -> None:
        if not self._said and how == KILLED:
            self._cause = Cause.KILLED
        self._said = self._said or f"the engine process ended: {how}"
        self._exit.set()
        self._changed.set()

    def _lost(self) -> None:
        """A ready owner is gone, or as good as gone: told once, in the turn in which it shows."""
        if self.state is not EngineState.READY:
            return
        now = self._clock()
        lived_s = 0.0 if self._ready_at is None else now - self._ready_at
        self._become(EngineState.RESTARTING, self._said)
        self.deaths.add(self._cause, lived_s=lived_s, now=now)
        assert self._owner is not None
        death = Death(self._cause, self._told, self._owner.in_steps())
        self.deaths.explain(self._listener.on_death(death))
        self._away()

    @property
    def _told(self) -> str:
        """Why the owner ended, in words that clients may read."""
        return self._said if self._plain else NOT_TOLD

    def _away(self) -> float:
        """Tell until when the engine is expected to be away; the back-off before its next start, in seconds."""
        backoff_s = self.deaths.backoff_s(self._failed_starts)
        self.outage.lasts(backoff_s + self.load_s)
        self._become(EngineState.RESTARTING, self._said)
        self._listener.on_away(EngineUnavailable(f"the engine is restarting ({self._told})"))
        return backoff_s

    def _fail(self, reason: str) -> None:
        what = "the engine did not start" if self.state is EngineState.STARTING else "the engine has failed for good"
        self._become(EngineState.FAILED, reason)
        log.error("%s: %s", what, reason)
        error = EngineUnavailable(f"the engine has failed for good: {reason if self._plain else 'see its log'}")
        self._listener.on_lost(EngineDied(error.message), error)

    # Changes of state ------------------------------------------------------------------------------------------------

    def _become(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self.told = reason if self._plain or not reason else NOT_TOLD
        self._changed.set()

    async def _change(self) -> None:
        """Returns after the next change. Several may wait: the event is replaced, never cleared under them."""
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()
