"""Jobs: functions that the owner runs between steps, awaited on the event loop.

A caller returns only at the job's terminal event, however often it is cancelled: the first cancellation asks the job to
stop and calls `on_cancel`; none releases the owner before the job has unwound (A3, A5).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

from ..core.messages import CancelJob, JobDone, RunJob
from ..errors import TreadleError, from_code

log = logging.getLogger(__name__)


class Jobs:
    """Jobs in flight, on the event loop."""

    def __init__(self, send: Callable[[RunJob | CancelJob], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._futures: dict[str, asyncio.Future[Any]] = {}

    @property
    def pending(self) -> int:
        return len(self._futures)

    async def run(self, name: str, *, on_cancel: Callable[[], None] | None = None, **args: Any) -> Any:
        """Run the job `name` on the owner between steps and return its plain result.

        `on_cancel` is called on the event loop when this caller is cancelled while the job can still stop. Raises
        JobFailed when the job raised, InvalidRequest for an unknown name, EngineDied when the engine was lost, and the
        errors of `send` when there is no engine.
        """
        job_id = f"job-{next(self._numbers)}"
        self._send(RunJob(id=job_id, name=name, args=args))
        future = self._futures[job_id] = asyncio.get_running_loop().create_future()
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                if cancelled is None and not future.done():
                    self._ask_to_stop(job_id, on_cancel)
                cancelled = cancelled or error
        if cancelled is not None:
            future.exception()
            raise cancelled
        return future.result()

    def done(self, message: JobDone) -> None:
        """Handle a job's terminal event."""
        future = self._futures.pop(message.id, None)
        if future is None:
            return
        if message.code:
            future.set_exception(from_code(message.code, message.message))
        else:
            future.set_result(message.result)

    def fail_all(self, error: TreadleError) -> None:
        """Fail all jobs, as the engine is gone."""
        futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_exception(copy.copy(error))

    def _ask_to_stop(self, job_id: str, on_cancel: Callable[[], None] | None) -> None:
        self._send(CancelJob(id=job_id))
        if on_cancel is None:
            return
        try:
            on_cancel()
        except Exception:
            log.exception("on_cancel of job %s failed; the job is being stopped all the same", job_id)
