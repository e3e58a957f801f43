"""Decorator that runs a coroutine test in an event loop of its own, and fails if tasks outlive it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

GRPC = ("_AioCall.", "_schedule_rpc_coro", "_handle_exceptions")
"""Beginnings of names of coroutines: a client waits for the end of a call, a server runs a handler."""
GRPC_END_S = 10.0


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def whole() -> None:
            await asyncio.wait_for(test(*args, **kwargs), timeout=120)
            await _calls_end()
            left = _others()
            assert not left, f"tasks left behind: {left}"

        asyncio.run(whole())

    return run


async def _calls_end() -> None:
    """Wait for gRPC's own tasks. Closing a channel and stopping a server cancel calls; another thread tells each when
    that is done."""
    calls = {task for task in _others() if getattr(task.get_coro(), "__qualname__", "").startswith(GRPC)}
    if calls:
        await asyncio.wait(calls, timeout=GRPC_END_S)


def _others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
