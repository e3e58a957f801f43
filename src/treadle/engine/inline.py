"""Owner that runs on the caller's thread, for tests and offline work."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from ..core.messages import Failed, FromOwner, Ping, Pong, Ready, Stop, Stopped, ToOwner
from ..runner.base import Runner, RunnerFactory
from .handle import OnExit, OnMessage
from .in_flight_table import InFlightTable
from .loop import EngineLoop
from .mailbox import Mailbox
from .owner import OwnerLimits, build_runner, close_runner, scheduler_of


class InlineOwner:
    """Owner on the event loop's thread. With `pump`, each message makes the event loop run steps, one an iteration,
    until there is no work; without it, call `run_once`. Its runner never rests."""

    def __init__(
        self,
        build: RunnerFactory,
        limits: OwnerLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        pump: bool = False,
    ) -> None:
        self.mailbox = Mailbox()
        self._table = InFlightTable()
        self.runner: Runner | None = None
        self.loop: EngineLoop | None = None
        self._build = build
        self._limits = limits
        self._clock = clock
        self._pump = pump
        self._pumping = False
        self._ended = asyncio.Event()
        self._on_message: OnMessage = lambda message: None
        self._on_exit: OnExit = lambda how: None

    @property
    def pid(self) -> int | None:
        return os.getpid()

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        self._on_message, self._on_exit = on_message, on_exit
        self.runner = build_runner(self._build, self._send)
        if self.runner is None:
            return
        scheduler = scheduler_of(self.runner, self._limits)
        self.loop = EngineLoop(self.runner, scheduler, self.mailbox, self._send, self._clock, self._table)
        if self._pump:
            loop = asyncio.get_running_loop()

            def pump() -> None:
                loop.call_soon_threadsafe(self._start_pumping)

            self.runner.notify_grammars(pump)
        self._send(Ready(capabilities=self.runner.capabilities(), pid=os.getpid()))

    def send(self, message: ToOwner) -> None:
        if isinstance(message, Ping):  # it runs on this thread, so it is between two steps
            self._send(Pong())
            return
        self.mailbox.put(message)
        if self._pump:
            self._start_pumping()
        elif isinstance(message, Stop):
            self.run_once()

    def run_once(self) -> None:
        """Run one iteration of the engine loop."""
        if self.loop is None or self.loop.stopped:
            return
        try:
            self.loop.run_once()
        except Exception as error:
            self.loop.die(str(error))

    def kill(self) -> bool:
        if self.loop is not None:
            self.loop.stopped = True
        self._end("killed")
        return True

    async def ended(self) -> None:
        await self._ended.wait()

    def is_suspended(self) -> bool:
        return False

    def in_steps(self) -> frozenset[int]:
        return self._table.read()

    def _start_pumping(self) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.run_once()
        self._pumping = False
        if self.loop is None or self.loop.stopped:
            return
        if self.loop.has_work:
            self._start_pumping()
        elif (wait_s := self.loop.grammar_wait_s) is not None:
            asyncio.get_running_loop().call_later(wait_s, self._start_pumping)

    def _send(self, message: FromOwner) -> None:
        self._on_message(message)
        if isinstance(message, Stopped | Failed):
            self._end("stopped" if isinstance(message, Stopped) else message.message)

    def _end(self, how: str) -> None:
        if self._ended.is_set():
            return
        if self.runner is not None:
            close_runner(self.runner)
        self._ended.set()
        self._on_exit(how)
