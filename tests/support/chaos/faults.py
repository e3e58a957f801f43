"""Faults of a server, and the health that it must report meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from .engine import KILLS, ORDER, StepFault, give_order
from .health import DEATH_S, HANG_S, RECOVERY_S, Watcher
from .oracle import REFUSED_FOR_EVER, Window
from .plan import DEATHS, Fault
from .server import Server

CRASH_LOOP_S = 300.0
MOST_DEATHS = 7
"""Limit in CRASH_LOOP_S: a server whose engine dies repeatedly gives up, as it should."""
TAKEN_S = 10.0
DEAF_S = 3.0
HOARD_S = 2.0
HOARD_MORE = 64  # connections beyond the server's limit
SLOW_STEPS = 8
RESTARTS_AT_MOST_S = 60.0
PROBES_HAVE_PLACES = True
"""Whether health is answered while other clients hold every connection that the server accepts."""


@dataclass
class Attack:
    """Commits faults on `server`, records their windows, and wrong health in `problems`."""

    server: Server
    watcher: Watcher
    hang_after_s: float
    drain_s: float
    survives_death: bool
    load_s: float = 2.0
    patience: float = 1.0  # factor of all bounds, for busy machines
    windows: list[Window] = field(default_factory=list)
    silent: list[tuple[float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    died: list[float] = field(default_factory=list)
    spared: int = 0

    @property
    def deaths(self) -> int:
        """Number of times that the engine was killed."""
        return len(self.died)

    async def strike(self, fault: Fault) -> None:
        """Commit a fault, and return once the server serves again. A death too many is left out: see MOST_DEATHS."""
        now = time.monotonic()
        if fault in DEATHS and sum(now - at < CRASH_LOOP_S for at in self.died) >= MOST_DEATHS:
            self.spared += 1
            return
        window = Window(fault, now)
        self.windows.append(window)
        try:
            await _ACTIONS[fault](self)
        except (OSError, RuntimeError, TimeoutError, asyncio.IncompleteReadError) as error:
            self.problems.append(f"{fault}: {type(error).__name__}: {error}")
        finally:
            await self.revive()
            window.ended = time.monotonic() + 0.5

    async def revive(self) -> None:
        """Start a new server if the old one has ended, or does not recover."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            await self.server.ready(RESTARTS_AT_MOST_S)
            return
        end = "ended" if self.server.ended is not None else "never came back"
        self.problems.append(f"the server {end} (exit {self.server.ended}): {self.server.last_words()[-200:]!r}")
        began = time.monotonic()
        self.server.kill()
        self.server.begin()
        await self.server.ready()
        self.silent.append((began - RESTARTS_AT_MOST_S, time.monotonic()))

    def wrong(self, label: str) -> None:
        self.problems.append(label)

    # Deaths ------------------------------------------------------------------------------------------------------

    async def killed(self, number: signal.Signals, bound_s: float = DEATH_S) -> None:
        """End the engine with a signal."""
        began = time.monotonic()
        if self.server.signal_engine(number) is not None:
            await self.recovers(number.name, began, bound_s)

    async def ordered(self, kind: StepFault, bound_s: float = DEATH_S) -> None:
        """End the engine in a step."""
        if (began := await self.order(kind)) is not None:
            await self.recovers(kind, began, bound_s)

    async def recovers(self, label: str, began: float, bound_s: float) -> None:
        """Check that `ready` is 503 within its bound, and 200 again within another."""
        self.died.append(began)
        bound_s *= self.patience
        outage = await self.watcher.seen("ready", 503, began, bound_s + 2.0)
        if outage is None:
            self.wrong(f"{label}: ready was not 503 within {bound_s + 2.0:.1f} s")
            return
        if outage.at - began > bound_s:
            self.wrong(f"{label}: ready was 503 only after {outage.at - began:.1f} s, bound {bound_s:.1f}")
        within_s = self.patience * (self.load_s + RECOVERY_S)
        if await self.watcher.seen("ready", 200, outage.at, within_s) is None:
            self.wrong(f"{label}: not ready again within {within_s:.1f} s")

    async def order(self, kind: StepFault, steps: int = 1) -> float | None:
        """Make a step fail. Returns the time, or None if no step came in time."""
        path = self.server.orders / ORDER
        give_order(self.server.orders, kind, steps)
        end = time.monotonic() + TAKEN_S
        while time.monotonic() < end:
            if not path.exists():
                return time.monotonic()
            await asyncio.sleep(0.005)
        path.unlink(missing_ok=True)
        return None

    async def poison(self) -> None:
        """Send a request that kills the engine: another one each time, as it is refused from then on."""
        began = time.monotonic()
        number = len(self.windows)
        body = {"prompt": [*KILLS, 10 + number % 100, 10 + number // 100], "max_tokens": 4}
        status, answer = await self.server.door.post("/v1/completions", body, RESTARTS_AT_MOST_S)
        if status == 503:
            return  # it never ran
        expected = REFUSED_FOR_EVER if self.survives_death else "engine_died"
        if expected not in answer.decode():
            self.wrong(f"poison: answered {status} {answer[:200]!r}, wanted {expected}")
        await self.recovers("poison", began, RESTARTS_AT_MOST_S)
        if self.survives_death:
            await self.unharmed("poison, sent again", lambda: self.refused_for_ever(body))

    async def refused_for_ever(self, body: Mapping[str, object]) -> None:
        status, answer = await self.server.door.post("/v1/completions", body, RESTARTS_AT_MOST_S)
        if status != 503 and REFUSED_FOR_EVER not in answer.decode():
            self.wrong(f"poison, sent again: answered {status} {answer[:200]!r}, wanted {REFUSED_FOR_EVER}")

    # Faults without effect on clients --------------------------------------------------------------------------------

    async def unharmed(self, label: str, action: Callable[[], Awaitable[object]]) -> None:
        """Check that the engine is not replaced."""
        before = (await self.server.status())["engine"]["restarts"]
        await action()
        after = (await self.server.status())["engine"]["restarts"]
        if after != before:
            self.wrong(f"{label}: the engine was replaced")

    async def paused(self) -> None:
        """Stop the engine for less than the hang bound."""

        async def pause() -> None:
            self.server.signal_engine(signal.SIGSTOP)
            await asyncio.sleep(self.hang_after_s / 2)
            self.server.signal_engine(signal.SIGCONT)

        await self.unharmed("SIGSTOP and SIGCONT", pause)

    async def frozen(self) -> None:
        """Stop the server for longer than the hang bound."""

        async def freeze() -> None:
            began = time.monotonic()
            self.server.signal(signal.SIGSTOP)
            await asyncio.sleep(self.hang_after_s + 0.5)
            self.server.signal(signal.SIGCONT)
            await asyncio.sleep(1.0)
            self.silent.append((began, time.monotonic()))

        await self.unharmed("the server's SIGSTOP and SIGCONT", freeze)

    async def deaf(self) -> None:
        """Leave standard error unread."""

        async def ignore() -> None:
            log = self.server.log
            if log is not None:
                log.deaf.set()
                await asyncio.sleep(DEAF_S)
                log.deaf.clear()

        with contextlib.suppress(TimeoutError):
            await self.unharmed("an unread standard error", ignore)

    async def hoard(self, *, kill: bool = False) -> None:
        """Take every descriptor that the server has for connections, over HTTP and gRPC."""
        began = time.monotonic()
        socks: list[socket.socket] = []
        try:
            for i in range((self.server.open_files or 256) + HOARD_MORE):
                await _connect(self.server.ports[i % 2], socks)
            if kill:
                self.server.signal_engine(signal.SIGKILL)
                self.died.append(time.monotonic())
            await asyncio.sleep(HOARD_S)
        finally:
            for sock in socks:
                sock.close()
        await self.server.ready(self.patience * (self.load_s + RECOVERY_S))
        if not PROBES_HAVE_PLACES:
            self.silent.append((began, time.monotonic()))

    async def flush(self) -> None:
        status, _ = await self.server.door.post("/v1/prefix_cache/reset", {}, 20.0)
        if status not in (200, 503):
            self.wrong(f"flush: {status}")

    # Ends --------------------------------------------------------------------------------------------------------

    async def drained(self, *, full_disk: bool = False) -> None:
        """Send SIGTERM, and start afresh."""
        began = time.monotonic()
        await self.end()
        self.server.begin(full_disk=full_disk)
        await self.server.ready()
        self.silent.append((began, time.monotonic()))

    async def end(self) -> None:
        """Send SIGTERM: running requests end, then the server does, with 0 and without a child left."""
        code = await self.server.stop(within_s=self.drain_s + 10.0)
        if code != 0:
            self.wrong(f"SIGTERM: exit code {code}: {self.server.last_words()[-200:]!r}")
        if orphans := self.server.orphans():
            self.wrong(f"SIGTERM: engines left: {orphans}")


async def _connect(port: int, socks: list[socket.socket]) -> None:
    sock = socket.socket()
    sock.setblocking(False)
    socks.append(sock)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(0.2):
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))


async def _nothing(attack: Attack) -> None:
    return


def _step(kind: StepFault, steps: int = 1) -> Callable[[Attack], Awaitable[None]]:
    """Return a fault of a step that must affect no client."""

    async def do(attack: Attack) -> None:
        await attack.unharmed(kind, lambda: attack.order(kind, steps))

    return do


async def _starve(attack: Attack) -> None:
    """Starve the engine of memory, which may kill it."""
    await attack.order(StepFault.STARVE)
    await asyncio.sleep(2.0)
    attack.died.append(time.monotonic())


_ACTIONS: Mapping[Fault, Callable[[Attack], Awaitable[None]]] = {
    Fault.NONE: _nothing,
    Fault.KILL: lambda attack: attack.killed(signal.SIGKILL),
    Fault.ABRT: lambda attack: attack.killed(signal.SIGABRT),
    Fault.SEGV: lambda attack: attack.killed(signal.SIGSEGV),
    Fault.STOP: lambda attack: attack.killed(signal.SIGSTOP, attack.hang_after_s + HANG_S),
    Fault.STEP_SEGV: lambda attack: attack.ordered(StepFault.SEGV),
    Fault.STEP_ABORT: lambda attack: attack.ordered(StepFault.ABORT),
    Fault.BROKEN: lambda attack: attack.ordered(StepFault.BROKEN),
    Fault.HANG: lambda attack: attack.ordered(StepFault.HANG, attack.hang_after_s + HANG_S),
    Fault.POISON: lambda attack: attack.poison(),
    Fault.STARVE: _starve,
    Fault.STOP_CONT: lambda attack: attack.paused(),
    Fault.PARENT_STOP: lambda attack: attack.frozen(),
    Fault.RAISE: _step(StepFault.RAISE),
    Fault.RAISE_PLAN: _step(StepFault.RAISE_PLAN),
    Fault.RAISE_READ: _step(StepFault.RAISE_READ),
    Fault.RAISE_RELEASE: _step(StepFault.RAISE_RELEASE),
    Fault.ALLOCATE: _step(StepFault.ALLOCATE),
    Fault.MEMORY: _step(StepFault.MEMORY),
    Fault.SLOW: _step(StepFault.SLOW, SLOW_STEPS),
    Fault.BABBLE: _step(StepFault.BABBLE),
    Fault.DEAF: lambda attack: attack.deaf(),
    Fault.HOARD: lambda attack: attack.hoard(),
    Fault.HOARD_KILL: lambda attack: attack.hoard(kill=True),
    Fault.FLUSH: lambda attack: attack.flush(),
    Fault.DRAIN: lambda attack: attack.drained(),
    Fault.FULL_DISK: lambda attack: attack.drained(full_disk=True),
}
