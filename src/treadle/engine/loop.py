"""Engine loop of the owner. `run_once` is the whole engine: take, plan, start, finish and apply, flush.

Invariants:
- Everything here runs on the owner's thread; other threads reach it only through the mailbox.
- With lookahead, a step is started before the previous one is finished. No more than `lookahead` steps stay in flight,
  and they finish in order. When a job runs, no step is in flight and finished sequences have been released.
- All cancels that have arrived are applied between two steps (B3). The runner has released all finished sequences
  before it is asked for free memory.
- Every request message is answered by exactly one terminal event, also during shutdown (C3). If this owner fails,
  Failed is that event for every sequence: the client replays them on the next owner.
- An error in a step, or in its planning, fails only the sequence to blame. A broken runner, or steps that keep raising,
  end this owner with Failed, and the supervisor starts another (B7).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.messages import (
    BlockEvent,
    Cancel,
    CancelJob,
    Failed,
    Finish,
    FinishReason,
    FromOwner,
    JobDone,
    Output,
    Ping,
    Pong,
    RunJob,
    StepReport,
    Stop,
    Stopped,
    Submit,
    ToOwner,
    WatchBlocks,
)
from ..core.plan import StepPlan
from ..core.plan_builder import SequenceFault
from ..core.scheduler import Scheduler
from ..core.statistics import RunnerStatistics
from ..runner.base import Runner, RunnerBroken
from .in_flight_table import InFlightTable
from .mailbox import Mailbox

log = logging.getLogger(__name__)

MAX_FAILING_STEPS = 24
MAX_RELEASE_TRIES = 3
BEAT_S = 1.0
REST_AFTER_S = 10.0


@dataclass(slots=True)
class _JobContext:
    """Context of a running job. Checking `cancelled` also sends a heartbeat."""

    loop: EngineLoop
    job_id: str

    def cancelled(self) -> bool:
        self.loop.beat()
        return self.loop.mailbox.job_cancelled(self.job_id)


class EngineLoop:
    """Loop over one runner. `send` passes a message to the client and must not block. `table` is read by the client
    when this owner is lost."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        mailbox: Mailbox,
        send: Callable[[FromOwner], None],
        clock: Callable[[], float] = time.monotonic,
        table: InFlightTable | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.mailbox = mailbox
        self.stopped = False
        self._send = send
        self._clock = clock
        self._table = table or InFlightTable()
        can = runner.capabilities()
        self._lookahead = can.steps.lookahead
        self._counts_blocks = can.kv.blocks > 0
        self._jobs: deque[RunJob] = deque()
        self._step = 0
        self._step_s = 0.0
        self._last_result = 0.0
        self._memory = RunnerStatistics()
        self._failing = 0
        self._unreleased: dict[str, int] = {}
        self._watched: set[str] = set()
        self._more_events = False
        self._beat = clock()
        self._idle_since: float | None = None
        self._rested = False
        runner.notify_grammars(mailbox.wake)

    def run(self) -> None:
        """Run steps until Stop, and sleep while idle. The runner trims its memory after REST_AFTER_S idle
        seconds: a request that arrives before finds warm buffers."""
        while not self.stopped:
            if self.has_work:
                self.run_once()
            else:
                self._sleep()

    def _sleep(self) -> None:
        """Wait for messages and handle them; let the runner rest when it is due. Pings do not delay that."""
        if self.scheduler.live:
            self.run_once(wait_s=self.grammar_wait_s)
            return
        now = self._clock()
        if self._idle_since is None:
            self._idle_since, self._rested = now, False
            if self._step:
                self._report_memory()
        left_s = self._idle_since + REST_AFTER_S - now
        if not self._rested and not self.mailbox.wait(max(0.0, left_s)):
            self._rest()
            self._rested = True
        self.run_once(wait_s=None)

    def _rest(self) -> None:
        """Let the runner trim its memory, and report it."""
        self.runner.trim_memory()
        self._report_memory()

    def _report_memory(self) -> None:
        """Report what is held now: sequences are released behind the report of their last tokens."""
        self._memory = self.runner.statistics()
        self._report(())

    def run_once(self, wait_s: float | None = 0.0) -> None:
        """Run one iteration; when idle, wait up to `wait_s` seconds (None: without limit) for a message."""
        self._take(0.0 if self.has_work else wait_s)
        if self.stopped:
            return
        if self.scheduler.in_flight == 1 and _has_first_tokens_alone(self.scheduler.oldest_plan):
            self._flush(self._finish_until(0))
        try:
            plan = self._plan()
        except RunnerBroken:
            raise
        except Exception as error:
            outputs = self._recover_planning(error)
        else:
            outputs = self._advance(plan)
        self._flush(outputs)

    def beat(self) -> None:
        """Send a heartbeat, at most one every BEAT_S seconds, while nothing else is reported."""
        if self._clock() - self._beat >= BEAT_S:
            self._report(())

    @property
    def has_work(self) -> bool:
        """Whether `run_once` has anything to do but wait."""
        return self.scheduler.has_work or bool(self._jobs or self._unreleased) or self._more_events

    @property
    def grammar_wait_s(self) -> float | None:
        """Seconds until the next sequence that waits for its grammar expires; None if none does. A grammar that is
        compiled ends the wait for messages."""
        expiry = self.scheduler.next_expiry
        return None if expiry is None else max(0.0, expiry - self._clock())

    # Taking ------------------------------------------------------------------------------------------------------

    def _take(self, wait_s: float | None) -> None:
        messages = self.mailbox.take(wait_s)
        for message in messages:
            self._handle(message)
        if any(isinstance(message, Stop) for message in messages):
            self._stop()
        elif self._jobs:
            self._flush(self._finish_until(0))
            self._release_finished()
            self._run_job(self._jobs.popleft())

    def _handle(self, message: ToOwner) -> None:
        if isinstance(message, Ping):
            self._send(Pong())
            return
        self._idle_since = None
        match message:
            case Submit():
                self.scheduler.submit(message, self._clock())
                if message.constraint is not None:  # compiling its grammar may end this process
                    self._table.write(self.scheduler.exposed_arrivals)
            case Cancel():
                self.scheduler.cancel(message, self._clock())
            case RunJob():
                self._jobs.append(message)
            case WatchBlocks():
                self._watch(message)
            case CancelJob() if all(job.id != message.id for job in self._jobs):
                self.mailbox.forget_job(message.id)  # it arrived after the job's end

    def _watch(self, message: WatchBlocks) -> None:
        if message.on:
            self._watched.add(message.salt)
        else:
            self._watched.discard(message.salt)
        self.runner.watch_blocks(message.salt, message.on)
        self._more_events = bool(self._watched)

    def _run_job(self, job: RunJob) -> None:
        try:
            self._send(self._job_done(job))
        finally:
            self.mailbox.forget_job(job.id)

    def _job_done(self, job: RunJob) -> JobDone:
        if self.mailbox.job_cancelled(job.id):
            return JobDone(id=job.id, code="request_cancelled", message="cancelled before it began")
        try:
            jobs = self.runner.jobs()
            work = jobs.get(job.name)
            if work is None:
                known = ", ".join(sorted(jobs)) or "none"
                return JobDone(id=job.id, code="invalid_request", message=f"no job '{job.name}' here; known: {known}")
            return JobDone(id=job.id, result=work(_JobContext(self, job.id), job.args))
        except RunnerBroken:
            self._send(JobDone(id=job.id, code="engine_died", message="the engine broke in this job"))
            raise
        except Exception as error:
            log.exception("job %s failed", job.name)
            return JobDone(id=job.id, code="engine_job_failed", message=f"{type(error).__name__}: {error}")

    # Stepping ----------------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan:
        self._release_finished()
        plan = self.scheduler.plan(self._clock(), self.runner.free_blocks() if self._counts_blocks else None)
        self._release(self.scheduler.take_released_ids())  # those that were preempted
        for admit in plan.admit:
            if admit.request.id in self._unreleased:
                raise RunnerBroken(f"row {admit.request.id} can't be released, and would run twice")
        return plan

    def _advance(self, plan: StepPlan) -> tuple[Output, ...]:
        """Start `plan` and finish steps beyond the lookahead; if `plan` is idle, finish the oldest step."""
        if plan.idle:
            return self._finish_until(max(0, self.scheduler.in_flight - 1))
        if self.scheduler.in_flight == 1:
            self._last_result = self._clock()
        if plan.admit:
            self._table.write(self.scheduler.exposed_arrivals)
        try:
            self.runner.start(plan)
        except RunnerBroken:
            raise
        except Exception as error:
            return self._recover_start(plan, error)
        return self._finish_until(self._lookahead)

    def _finish_until(self, in_flight: int) -> tuple[Output, ...]:
        """Finish the oldest steps until at most `in_flight` are left; returns all pending outputs."""
        outputs: tuple[Output, ...] = ()
        while self.scheduler.in_flight > in_flight:
            outputs += self._finish(self.scheduler.oldest_plan)
        return outputs + self.scheduler.flush()

    def _finish(self, plan: StepPlan) -> tuple[Output, ...]:
        try:
            result = self.runner.finish()
        except RunnerBroken:
            raise
        except Exception as error:
            return self._recover(plan, error)
        self._failing = 0
        now = self._clock()
        self._step_s, self._last_result = now - self._last_result, now
        self._memory = self.runner.statistics()
        outputs = self.scheduler.apply(plan, result)
        if not outputs:  # as where it scores a prompt, or encodes an image
            self.beat()
        return outputs

    def _recover_start(self, plan: StepPlan, error: Exception) -> tuple[Output, ...]:
        """Recover from a step that could not be started, after finishing the steps before it. If one of those raises
        too, its recovery covers this step."""
        outputs = self._finish_until(1)
        return outputs + self._recover(plan, error) if self.scheduler.in_flight else outputs

    def _recover_planning(self, error: Exception) -> tuple[Output, ...]:
        """Recover from an error in planning: finish the steps in flight, then recompute the sequences one at a time."""
        row_id = error.id if isinstance(error, SequenceFault) else None
        cause = error.__cause__ or error if row_id is not None else error
        if isinstance(cause, RunnerBroken):
            raise cause
        log.error(
            "planning raised; its sequences are recomputed one at a time, and only the faulty one fails", exc_info=cause
        )
        outputs = self._finish_until(0)
        self._count_failure(cause)
        return outputs + self.scheduler.recover_planning(_client_message(cause), row_id)

    def _recover(self, plan: StepPlan, error: Exception) -> tuple[Output, ...]:
        log.error(
            "step %d raised; its sequences are recomputed one at a time, and only the faulty one fails",
            plan.step,
            exc_info=error,
        )
        self._count_failure(error)
        return self.scheduler.recover(plan, _client_message(error))

    def _count_failure(self, error: BaseException) -> None:
        self._failing += 1
        if self._failing >= MAX_FAILING_STEPS:
            raise RunnerBroken(f"{self._failing} steps in a row raised; the last: {error}") from error
        self.beat()

    def _release_finished(self) -> None:
        self._release((*self._unreleased, *self.scheduler.take_released_ids()))

    def _release(self, row_ids: tuple[str, ...]) -> None:
        """Release each sequence separately. A failed release is retried in the next step, without affecting others
        (B5)."""
        for row_id in row_ids:
            try:
                self.runner.release(row_id)
            except RunnerBroken:
                raise
            except Exception as error:
                log.exception("the memory of sequence %s could not be released; trying again in the next step", row_id)
                tries = self._unreleased[row_id] = self._unreleased.get(row_id, 0) + 1
                if tries >= MAX_RELEASE_TRIES:
                    raise RunnerBroken(f"row {row_id} can't be released: {error}") from error
            else:
                self._unreleased.pop(row_id, None)

    # Reporting ---------------------------------------------------------------------------------------------------

    def _flush(self, outputs: tuple[Output, ...]) -> None:
        events = self._events() if self._watched else ()
        if outputs or events:
            self._report(outputs, events)
        if not self.scheduler.has_work:
            self.scheduler.check_integrity()

    def _events(self) -> tuple[BlockEvent, ...]:
        events = self.runner.block_events()
        self._more_events = bool(events)
        return events

    def _report(self, outputs: tuple[Output, ...], events: tuple[BlockEvent, ...] = ()) -> None:
        self._step += 1
        self._beat = self._clock()
        statistics = self.scheduler.statistics(self._beat, self._memory, step_s=self._step_s)
        self._send(StepReport(step=self._step, outputs=outputs, events=events, statistics=statistics))

    def _stop(self) -> None:
        self._end_all(Finish(reason=FinishReason.ERROR, code="server_stopping", message="the server is stopping"))
        self._send(Stopped())

    def die(self, message: str, reason: str = "") -> None:
        """End this owner after an error: report the sequences' last tokens, fail all jobs with `message`, and send
        Failed. `reason` is for operators only, as exceptions may name paths."""
        self.stopped = True
        try:
            self._empty_mailbox()
            self._report(self.scheduler.flush())
            self._end_jobs("engine_died", message)
        except Exception:
            log.exception("the scheduler's state is inconsistent; the client replays or ends the sequences it knows")
        self._send(Failed(code="engine_died", message=f"{message}: {reason}" if reason else message))

    def _end_all(self, finish: Finish) -> None:
        self.stopped = True
        self._empty_mailbox()
        self._report(self.scheduler.end_all(finish))
        self._end_jobs(finish.code, finish.message)

    def _empty_mailbox(self) -> None:
        for message in self.mailbox.take(0.0):
            self._handle(message)

    def _end_jobs(self, code: str, message: str) -> None:
        while self._jobs:
            self._send(JobDone(id=self._jobs.popleft().id, code=code, message=message))


def _has_first_tokens_alone(plan: StepPlan) -> bool:
    """Whether all that a step does is to end prompts: nobody has had a token before, and no other prompt goes on. Its
    tokens are told before the next step is started, which would take the host as long as a step."""
    ended = {row.id for row in plan.decode if row.position == 0}
    others = any(item.id not in ended for items in (plan.prefill, plan.encode, plan.score) for item in items)
    return 0 < len(ended) == len(plan.decode) and not others


def _client_message(error: BaseException) -> str:
    """Return a message for clients without the exception's text, which may name paths."""
    return f"{type(error).__name__}, see the server's log"
