"""Mailbox: the owner's only input queue (A4). Any thread puts, only the owner takes.

Rules: `put` never blocks and never fails; messages are taken in the order they were put; `take` may return nothing
after a timeout, `wake` or a spurious wake-up. A job's cancellation is visible before the owner takes its message, so
that a running job can notice it (A5); so is a Stop, which cancels every job.
"""

from __future__ import annotations

import threading

from ..core.messages import CancelJob, Stop, ToOwner


class Mailbox:
    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: list[ToOwner] = []
        self._cancelled_jobs: set[str] = set()
        self._stopping = False
        self._woken = False

    def wake(self) -> None:
        """End the owner's wait, present or next, without a message. Any thread."""
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def put(self, message: ToOwner) -> None:
        """Add one message and wake the owner. Any thread."""
        with self._arrived:
            self._messages.append(message)
            if isinstance(message, CancelJob):
                self._cancelled_jobs.add(message.id)
            elif isinstance(message, Stop):
                self._stopping = True
            self._arrived.notify()

    def take(self, timeout_s: float | None) -> list[ToOwner]:
        """Take all messages, waiting up to `timeout_s` seconds (None: without limit) for the first."""
        with self._arrived:
            if not (self._messages or self._woken) and timeout_s != 0:
                self._arrived.wait(timeout_s)
            messages, self._messages, self._woken = self._messages, [], False
            return messages

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for a message or `wake`. Return whether there was one."""
        with self._arrived:
            if not (self._messages or self._woken):
                self._arrived.wait(timeout_s)
            return bool(self._messages) or self._woken

    def job_cancelled(self, job_id: str) -> bool:
        """Whether a CancelJob for this job, or a Stop, has been put. Any thread."""
        with self._arrived:
            return self._stopping or job_id in self._cancelled_jobs

    def forget_job(self, job_id: str) -> None:
        """Forget the cancellation of a job that has ended."""
        with self._arrived:
            self._cancelled_jobs.discard(job_id)
