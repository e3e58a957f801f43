"""Supervisor of the engine's owner: starts it, watches its heartbeat, replaces it when it dies or hangs.

State transitions:

    STARTING -> READY            the owner sent Ready
    STARTING -> FAILED           the first start failed
    READY -> RESTARTING          the owner ended, sent Failed, or hung and was killed
    RESTARTING -> READY          the next owner sent Ready
    READY, RESTARTING -> FAILED  it hung and can't be killed (a thread), MAX_FAILED_STARTS restarts in a row failed, or
                                 it died too often without a culprit (`deaths`)
    any -> STOPPING -> STOPPED   `stop`

Events (`EngineEvents`): `on_death` once for each READY -> RESTARTING; it returns the number of deaths explained now.
Then `on_unavailable`, again after each failed restart; then `on_ready`. `on_lost` is the last event, in FAILED or
STOPPING.

A ready owner hangs when it owes work or a Pong and has sent nothing for `hang_after_s` seconds (`heartbeat`). A
starting one hangs when it has reported no new stage for `Timeouts.load_timeout_s` seconds. Messages of an owner that
was given up are dropped: its sequences are replayed from the messages before.
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
from ..outage import Outage
from .deaths import Cause, Death, Deaths
from .engine_events import EngineEvents
from .handle import KILLED, Launch, OwnerHandle, ends_within
from .heartbeat import Heartbeat
from .timeouts import Timeouts

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
STOP_GRACE_S = 5.0
KILL_GRACE_S = 5.0
SEE_LOG = "the server's log says why"  # replaces an exception's text, which may name paths


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Supervisor:
    def __init__(
        self, launch: Launch, events: EngineEvents, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = EngineState.STARTING
        self.stage = "starting"
        self.reason = ""  # for operators
        self.public_reason = ""  # for clients
        self.restarts = 0
        self.load_s = 0.0
        self.deaths = Deaths()
        self.on_stage: Callable[[str], None] = lambda stage: None
        self._launch = launch
        self._events = events
        self._timeouts = timeouts
        self._clock = clock
        self._owner: OwnerHandle | None = None
        self._started = False  # messages can be sent to the owner
        self._heartbeat = Heartbeat(timeouts.hang_after_s, clock)
        self._ready_at: float | None = None
        self._failed_at: float | None = None
        self._began = self._stage_at = clock()
        self.outage = Outage(clock)
        self._failed_starts = 0
        self._cause = Cause.CRASH
        self._distrust = ""  # the reason to kill the owner after an unexpected message
        self._exit_reason = ""  # the reason of the owner's end
        self._reason_is_public = True  # `_exit_reason` contains no exception's text, which may name paths
        self._exit = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # Life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises StartFailed with the reason."""
        self.begin()
        await self.ready()

    async def ready(self) -> None:
        """Wait until the engine is ready for the first time. Raises StartFailed with the reason."""
        while self.state is EngineState.STARTING:
            await self._next_change()
        if self.state is not EngineState.READY:
            raise StartFailed(self.reason or "the engine was stopped before it was ready")

    def begin(self) -> None:
        """Start the engine and return at once."""
        self._task = asyncio.create_task(self._watch(), name="treadle-supervisor")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the engine, and kill it if it has not ended after `grace_s` seconds. Idempotent."""
        if self.state not in (EngineState.FAILED, EngineState.STOPPING, EngineState.STOPPED):
            self._set_state(EngineState.STOPPING)
            self._events.on_lost(ServerStopping("the server is stopping"), ServerStopping("the server is stopping"))
        if self._started:
            self.send(Stop())
            await self._wait_or_kill(grace_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.state is not EngineState.FAILED:
            self._set_state(EngineState.STOPPED)

    def kill(self) -> None:
        """Kill the owner, for a process that is about to exit."""
        if self._owner is not None:
            self._owner.kill()

    async def failed(self) -> str:
        """Wait until the engine has failed for good; returns the reason."""
        while self.state is not EngineState.FAILED:
            await self._next_change()
        return self.reason

    def send(self, message: ToOwner) -> None:
        """Send a message to the owner, if there is one."""
        if self._owner is not None:
            self._owner.send(message)

    @property
    def pid(self) -> int | None:
        return None if self._owner is None else self._owner.pid

    @property
    def last_beat(self) -> float | None:
        """Time of this owner's last message; None before the first."""
        return self._heartbeat.last

    def hang_left_s(self) -> float:
        """Return the seconds until a silent owner will have been replaced, if it stays silent."""
        since = self._heartbeat.silent_s(self._began)
        return max(1.0, self._timeouts.hang_after_s - since) + self.load_s

    # Owners ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Supervise. An unexpected error fails the engine, so that nobody waits for it."""
        try:
            await self._supervise()
        except Exception as error:
            log.exception("the engine's supervision failed; the engine is killed and not restarted")
            self.kill()
            self._reason_is_public = False
            self._fail(f"its supervision failed ({type(error).__name__}: {error})")

    async def _supervise(self) -> None:
        while True:
            was_ready = await self._run_owner()
            if self._is_final():
                return
            if reason := self._give_up_reason(was_ready):
                self._fail(reason)
                return
            self.restarts += 1
            backoff_s = self._announce_restart()
            self._log_loss(was_ready, backoff_s)
            await asyncio.sleep(backoff_s)
            if self._is_final():
                return

    def _log_loss(self, was_ready: bool, backoff_s: float) -> None:
        again = f"starting it again in {backoff_s:.1f} s (restart {self.restarts})"
        if was_ready:
            effect = "running requests pause until then, new ones get 503"
            log.warning("engine lost (%s); %s; %s; %s", self._exit_reason, again, effect, self._cause.hint)
        else:
            log.warning("the engine did not start (%s); %s", self._exit_reason, again)

    def _is_final(self) -> bool:
        return self.state in (EngineState.STOPPING, EngineState.FAILED)

    def _give_up_reason(self, was_ready: bool) -> str:
        """Return the reason not to start another owner; "" if there is none."""
        if was_ready:
            self._failed_starts = 0
            return self.deaths.crash_loop_reason(self._clock())
        self._failed_starts += 1
        first = self.state is EngineState.STARTING
        return self._exit_reason if first or self._failed_starts >= MAX_FAILED_STARTS else ""

    async def _run_owner(self) -> bool:
        """Start an owner and watch it to its end. Returns whether it was ever ready."""
        self._exit.clear()
        self._exit_reason = self._distrust = ""
        self._reason_is_public = True
        self._cause = Cause.CRASH
        self._ready_at = self._failed_at = None
        self._heartbeat.reset()
        self._began = self._stage_at = self._clock()
        await self._launch_owner()
        while not self._exit.is_set():
            if self.state is not EngineState.STOPPING and (why := self._kill_reason()):
                await self._kill_hung(why)
                break
            self._ping()
            await self._wait_for_check()
        self._on_lost()
        return self._ready_at is not None

    async def _launch_owner(self) -> None:
        """Launch and start an owner. A failed launch counts as its end."""
        self._started = False
        try:
            self._owner = self._launch()
            await self._owner.start(self._on_message, self._on_exit)
            self._started = True
        except Exception as error:
            log.exception("the engine could not be launched")
            self._exit_reason, self._reason_is_public = f"the engine could not be launched: {error}", False
            self._exit.set()

    async def _wait_for_check(self) -> None:
        """Wait for a change, or until the next check of the heartbeat is due."""
        due = asyncio.get_running_loop().time() + min(1.0, self._timeouts.hang_after_s / 4)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await self._next_change()
        self._heartbeat.on_check(asyncio.get_running_loop().time() - due)

    def _ping(self) -> None:
        """Ping an idle owner if it is due. A working one is alive by its step reports."""
        idle = self.state is EngineState.READY and self._events.work_since() is None
        if idle and self._heartbeat.should_ping():
            self.send(Ping())

    def _kill_reason(self) -> str:
        """Return the reason to kill this owner now; "" if there is none."""
        if self._distrust:
            return self._distrust
        if self._failed_at is not None:
            late = self._clock() - self._failed_at > KILL_GRACE_S
            return f"{self._exit_reason}; it did not end after that" if late else ""
        if self._ready_at is None:
            within_s = self._timeouts.load_timeout_s(self.load_s if self.restarts else None)
            late = self._heartbeat.silent_s(self._stage_at) > within_s
            return f"not ready within {within_s:g} s ({self.stage})" if late else ""
        return self._hang_reason()

    def _hang_reason(self) -> str:
        since = self._events.work_since()
        silent_s = 0.0 if since is None else self._heartbeat.silent_s(since)
        if silent_s > self._timeouts.hang_after_s:
            return self._classify_hang(f"no step for {silent_s:.1f} s while work waits")
        if silent_s := self._heartbeat.unanswered_s():
            return self._classify_hang(f"no word for {silent_s:.1f} s, idle and asked for one")
        return ""

    def _classify_hang(self, why: str) -> str:
        """Set the cause of a hang: a process stopped from outside is no request's fault. Returns the reason."""
        assert self._owner is not None
        stopped = self._owner.is_suspended()
        self._cause = Cause.KILLED if stopped else Cause.HANG
        return f"hung: {why}" + ("; its process was stopped from outside (SIGSTOP, a debugger)" if stopped else "")

    async def _kill_hung(self, why: str) -> None:
        """Kill a hung or faulty owner. If it does not end even then, the engine fails for good."""
        log.error("killing the engine: %s; it is started again, and running requests continue", why)
        self._exit_reason = why
        assert self._owner is not None
        killed = self._owner.kill()
        self._on_lost()
        if not await ends_within(self._owner, KILL_GRACE_S):
            where = "its process does not end" if killed else "it runs on a thread, which can't be ended"
            self._fail(f"{why}; {where}: restart the server")

    async def _wait_or_kill(self, grace_s: float) -> None:
        """Wait for the owner's end, and kill it after `grace_s` seconds."""
        assert self._owner is not None
        if not await ends_within(self._owner, grace_s) and self._owner.kill():
            await ends_within(self._owner, KILL_GRACE_S)

    # Messages of the owner ------------------------------------------------------------------------------------------

    def _on_message(self, message: FromOwner) -> None:
        try:
            self._handle(message)
        except Exception as error:
            log.exception("a message of the engine could not be handled; the engine is replaced")
            self._distrust = f"its message could not be handled ({type(error).__name__}: {error})"
            self._reason_is_public = False
            self._changed.set()

    def _handle(self, message: FromOwner) -> None:
        now = self._heartbeat.on_message()
        match message:
            case Loading(stage=stage):
                self.stage, self._stage_at = stage, now
                self.on_stage(stage)
                self._changed.set()
            case Ready() if self.state in (EngineState.STARTING, EngineState.RESTARTING) and not self._exit_reason:
                self._ready_at = now
                self.load_s = max(message.load_s, now - self._began)
                self._set_state(EngineState.READY)
                self._events.on_ready(message.capabilities)
            case Failed():
                self._exit_reason, self._failed_at, self._reason_is_public = message.message, now, False
                self._on_lost()
                self._changed.set()
            case Ready() | Stopped():
                self._changed.set()
            case StepReport() | JobDone() if self.state is EngineState.READY:
                self._events.on_message(message)
            case _:
                log.debug("ignored message of the engine: %s", type(message).__name__)

    def _on_exit(self, how: str) -> None:
        if not self._exit_reason and how == KILLED:
            self._cause = Cause.KILLED
        self._exit_reason = self._exit_reason or f"the engine process ended: {how}"
        self._exit.set()
        self._changed.set()

    def _on_lost(self) -> None:
        """Report the death of a ready owner, once."""
        if self.state is not EngineState.READY:
            return
        now = self._clock()
        lived_s = 0.0 if self._ready_at is None else now - self._ready_at
        self._set_state(EngineState.RESTARTING, self._exit_reason)
        self.deaths.add(self._cause, lived_s=lived_s, now=now)
        assert self._owner is not None
        death = Death(self._cause, self._public_exit_reason, self._owner.in_steps())
        self.deaths.explain(self._events.on_death(death))
        self._announce_restart()

    @property
    def _public_exit_reason(self) -> str:
        """The reason of the owner's end, for clients."""
        return self._exit_reason if self._reason_is_public else SEE_LOG

    def _announce_restart(self) -> float:
        """Announce the outage and its expected end. Returns the back-off before the next start, in seconds."""
        backoff_s = self.deaths.backoff_s(self._failed_starts)
        self.outage.expect(backoff_s + self.load_s)
        self._set_state(EngineState.RESTARTING, self._exit_reason)
        self._events.on_unavailable(EngineUnavailable(f"the engine is restarting ({self._public_exit_reason})"))
        return backoff_s

    def _fail(self, reason: str) -> None:
        if self.state is not EngineState.STARTING:  # then `ready` raises, and its caller reports
            log.error("the engine has failed for good: %s", reason)
        self._set_state(EngineState.FAILED, reason)
        cause = reason if self._reason_is_public else "see its log"
        error = EngineUnavailable(f"the engine has failed for good: {cause}")
        self._events.on_lost(EngineDied(error.message), error)

    # State ------------------------------------------------------------------------------------------------------------

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self.state = state
        self.reason = reason
        self.public_reason = reason if self._reason_is_public or not reason else SEE_LOG
        self._changed.set()

    async def _next_change(self) -> None:
        """Wait for the next change. The event is replaced, never cleared, as there may be several waiters."""
        changed = self._changed
        if changed.is_set():
            changed = self._changed = asyncio.Event()
        await changed.wait()
