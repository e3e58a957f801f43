"""Waiting on the event loop: for work on a thread, for the first of several events, or for a shutdown."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own. Unlike an executor's, it delays neither the end of the event loop nor of the
    process when its caller is cancelled: a download or a conversion may take many minutes."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="treadle-aside", daemon=True).start()
    return await asyncio.wrap_future(future)


async def first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of `waits` returns, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def until(work: Any, shutdown: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Run `work` until it ends, or `shutdown` is set, or the web server has ended; raises what `work` raises."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait((working, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def in_background(work: Coroutine[Any, Any, None], name: str, does: str) -> asyncio.Task[None]:
    """Run `work` as a task that nobody awaits until the server ends. If it fails, log that what it `does` has ended."""

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s has failed, and stays away until the server is started again", does, exc_info=error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(on_done)
    return task
