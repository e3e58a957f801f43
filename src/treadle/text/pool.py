"""Bounded thread pool for rendering and tokenizing off the event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ..errors import Busy, ServerStopping, TreadleError

P = ParamSpec("P")
T = TypeVar("T")

_FORGET = 0.1  # weight of each new sample in the mean service time


@dataclass(frozen=True)
class PoolStatistics:
    """Pool counters. `pending`: calls running or queued; `mean_s`: recent mean service time in seconds."""

    pending: int
    done: int
    refused: int
    mean_s: float


class TextPool:
    """Thread pool with `workers` threads and at most `max_pending` calls running or queued; more get Busy.

    `run` and `close` must be called on the event loop's thread.
    """

    def __init__(self, *, workers: int = 2, max_pending: int = 64) -> None:
        self._workers = workers
        self._max_pending = max_pending
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="treadle-text")
        self._lock = threading.Lock()
        self._pending = self._done = self._refused = 0
        self._mean_s = 0.0
        self._closed = False

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` on a thread and return its result. When the caller is cancelled, queued work is withdrawn;
        running work continues and its result is dropped. Raises Busy, ServerStopping, and any error of `work`."""
        self._enter()
        future = self._executor.submit(self._timed, functools.partial(work, *args, **kwargs))
        future.add_done_callback(self._leave)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and not _caller_cancelled():
                raise ServerStopping("the server is shutting down") from None
            raise

    def statistics(self) -> PoolStatistics:
        with self._lock:
            return PoolStatistics(self._pending, self._done, self._refused, self._mean_s)

    def close(self) -> None:
        """Refuse new work and cancel queued work, whose callers get ServerStopping. Does not wait for running work."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise ServerStopping("the server is shutting down")
            if self._pending >= self._max_pending:
                self._refused += 1
                wait_s = max(1.0, self._pending * self._mean_s / self._workers)
                raise Busy("too many prompts are being tokenized; try again", retry_after_s=wait_s)
            self._pending += 1

    def _leave(self, _: Future[T]) -> None:
        with self._lock:
            self._pending -= 1

    def _timed(self, work: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            return work()
        except StopIteration as error:
            # A future can't carry StopIteration: its waiter would wait for ever.
            raise TreadleError("text work ended with StopIteration") from error
        except Exception:
            raise
        except BaseException as error:
            # A panic of a native library must not look like KeyboardInterrupt or SystemExit to the event loop.
            raise TreadleError(f"text work broke down: {error!r}") from error
        finally:
            self._note(time.monotonic() - started)

    def _note(self, spent_s: float) -> None:
        with self._lock:
            self._done += 1
            self._mean_s += (spent_s - self._mean_s) * (_FORGET if self._done > 1 else 1.0)


def _caller_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
