"""Fake owner controlled by a test, the queue of launched ones, and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from treadle.core.capabilities import Capabilities
from treadle.core.messages import FromOwner, Ping, Pong, Ready, StepReport, Stop, Stopped, Submit, ToOwner
from treadle.engine.handle import OnExit, OnMessage

CAN = Capabilities(model="fake", architecture="none", vocabulary=1000, context=100, device="cpu", dtype="float32")
WAIT_S = 60.0


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FakeOwner:
    """`polite` ends on Stop. `killable` ends when killed. `start_error` is raised by `start`; `stuck` never starts.
    `deaf` answers no ping. `joined` are ids of sequences in its steps."""

    def __init__(
        self,
        *,
        polite: bool = True,
        killable: bool = True,
        thread: bool = False,
        start_error: Exception | None = None,
        stuck: bool = False,
        deaf: bool = False,
    ) -> None:
        self.pid = 4711
        self.sent: list[ToOwner] = []
        self.joined: set[str] = set()
        self.stands_still = False
        self.kills = 0
        self.starting = asyncio.Event()
        self.cancelled = False
        self._polite, self._killable, self._thread = polite, killable, thread
        self._start_error, self._stuck, self._deaf = start_error, stuck, deaf
        self.pings = 0
        self._ended = asyncio.Event()
        self._on_message: OnMessage
        self._on_exit: OnExit

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        self._on_message, self._on_exit = on_message, on_exit
        self.starting.set()
        if self._start_error is not None:
            raise self._start_error
        if self._stuck:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True

    def send(self, message: ToOwner) -> None:
        if isinstance(message, Ping):
            self.pings += 1
            if not self._deaf:
                self.say(Pong())
            return
        self.sent.append(message)
        if isinstance(message, Stop) and self._polite and not self._ended.is_set():
            self.say(Stopped())
            self.end("stopped")

    def kill(self) -> bool:
        self.kills += 1
        if self._killable and not self._ended.is_set():
            self.end("killed by SIGKILL")
        return not self._thread

    async def ended(self) -> None:
        await self._ended.wait()

    def is_suspended(self) -> bool:
        return self.stands_still

    def in_steps(self) -> frozenset[int]:
        """Return the arrivals that are resumed, reported, or in `joined`."""
        submits = [message for message in self.sent if isinstance(message, Submit)]
        return frozenset(submit.arrival for submit in submits if submit.resumed or submit.id in self.joined)

    # Controls of the test

    def say(self, *messages: FromOwner) -> None:
        for message in messages:
            if isinstance(message, StepReport):
                self.joined |= {output.id for output in message.outputs}
            self._on_message(message)

    def ready(self, can: Capabilities = CAN, load_s: float = 0.5) -> None:
        self.say(Ready(capabilities=can, pid=self.pid, load_s=load_s))

    def end(self, how: str = "exit code 3") -> None:
        self._ended.set()
        self._on_exit(how)


class Yard:
    """Launcher of owners made by `make`, which hands each to the test."""

    def __init__(self, make: Callable[[], Any] = FakeOwner) -> None:
        self.make = make
        self.launched: list[Any] = []
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def __call__(self) -> Any:
        owner = self.make()
        self.launched.append(owner)
        self._queue.put_nowait(owner)
        return owner

    async def next(self) -> Any:
        """Return the next owner, once it is being started."""
        async with asyncio.timeout(WAIT_S):
            owner = await self._queue.get()
            await owner.starting.wait()
            return owner


async def settle(turns: int = 30) -> None:
    """Let all ready callbacks run."""
    for _ in range(turns):
        await asyncio.sleep(0)
