"""Decorator that runs a coroutine test in an event loop of its own, and fails if tasks outlive it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def whole() -> None:
            await asyncio.wait_for(test(*args, **kwargs), timeout=60)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left behind: {left}"

        asyncio.run(whole())

    return run
