"""The owner's one place of work (A4). Any thread puts; only the owner takes.

Rules: `put` never blocks and never fails; messages are taken in the order they were put; `take` may return nothing
(its time was up, or it woke for no reason), which is not an error. A job's cancellation is also visible at once,
before the owner takes it, so that a running job can notice (A5); so is a Stop, which cancels every job.
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
        """Everything that has arrived; waits up to `timeout_s` (None: as long as it takes) while there is nothing."""
        with self._arrived:
            if not self._messages and timeout_s != 0:
                self._arrived.wait(timeout_s)
            messages, self._messages = self._messages, []
            return messages

    def wait(self, timeout_s: float) -> bool:
        """Whether anything has arrived; waits up to `timeout_s` while there is nothing."""
        with self._arrived:
            if not self._messages:
                self._arrived.wait(timeout_s)
            return bool(self._messages)

    def job_cancelled(self, job_id: str) -> bool:
        """Whether a CancelJob for this job, or a Stop, has been put. Any thread."""
        with self._arrived:
            return self._stopping or job_id in self._cancelled_jobs

    def forget_job(self, job_id: str) -> None:
        """The job has ended: its cancellation means nothing any more."""
        with self._arrived:
            self._cancelled_jobs.discard(job_id)
