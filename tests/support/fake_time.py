"""Event loop with a fake clock, which moves to the next timer as soon as all tasks wait."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """For tasks that wait for each other and for time, never for I/O."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NoWaiting(self))

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds


class _NoWaiting(selectors.SelectSelector):
    def __init__(self, loop: FakeTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("everyone waits for something that will not come")
        self._loop.pass_time(timeout)
        return super().select(0)


def in_fake_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
            runner.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run
