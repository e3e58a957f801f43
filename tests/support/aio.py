"""Decorator that runs a coroutine test in an event loop of its own, and fails if tasks outlive it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

CYTHON = ("_AioCall.", "_schedule_rpc_coro", "_handle_exceptions")
"""Beginnings of names of gRPC's compiled coroutines: a client waits for the end of a call, a server runs a handler."""
CALLS = Path(grpc.aio.__file__).parent
"""Where gRPC's other coroutines are: a client begins a call, sends its messages."""
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
    calls = {task for task in _others() if _of_grpc(task.get_coro())}
    if calls:
        await asyncio.wait(calls, timeout=GRPC_END_S)


def _of_grpc(coroutine: Any) -> bool:
    code = getattr(coroutine, "cr_code", None)
    named = getattr(coroutine, "__qualname__", "").startswith(CYTHON)
    return named or (code is not None and CALLS in Path(code.co_filename).parents)


def _others() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
