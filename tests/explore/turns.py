"""An asyncio event loop without a selector: time moves when it is told to, and callbacks run when it is told to."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

START = 1_000_000.0
"""The first time. Every number above half of it is a time, see `fingerprint`."""


class TurnLoop(asyncio.AbstractEventLoop):
    """Callbacks, timers, futures and tasks: no file descriptor, no thread."""

    def __init__(self) -> None:
        self.now = START
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.errors: list[dict[str, Any]] = []
        self._numbers = 0

    # What asyncio asks for

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self.timers, (when, self._numbers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when they are due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, **options: Any) -> Any:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, name=name, **options)
        self.tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    # What the test does with it

    def turn(self) -> None:
        """Run what is ready now, but not what becomes ready meanwhile."""
        for _ in range(len(self.ready)):
            handle = self.ready.popleft()
            if not handle.cancelled():
                handle._run()

    def settle(self, most: int = 10_000) -> None:
        """Run until nothing is ready."""
        ran = 0
        while self.ready:
            handle = self.ready.popleft()
            if not handle.cancelled():
                handle._run()
            ran += 1
            if ran > most:
                raise AssertionError(f"the event loop never comes to rest: {handle!r}")

    def due(self) -> float | None:
        """When the next timer is due; None where there is none."""
        while self.timers and self.timers[0][2].cancelled():
            heapq.heappop(self.timers)
        return self.timers[0][0] if self.timers else None

    def advance(self, seconds: float, *, at_once: bool = False) -> None:
        """Let time pass; each timer fires when it is due, or with `at_once` all of them at the end."""
        end = self.now + seconds
        while not at_once and (due := self.due()) is not None and due <= end:
            self.now = max(self.now, due)
            self._fire()
            self.settle()
        self.now = end
        self._fire()

    def _fire(self) -> None:
        while (due := self.due()) is not None and due <= self.now:
            self.ready.append(heapq.heappop(self.timers)[2])

    def close(self) -> None:
        """Unwind every task, so that none is found pending when it is collected."""
        self.tasks = [task for task in self.tasks if not task.done()]
        for task in self.tasks:
            task.cancel()
        self.settle()
        self.ready.clear()
        self.timers.clear()
