"""Who runs in the next step, and what became of the last one. Pure: time comes in, plans and outputs go out.

First come, first served within a priority, into `max_running` slots; capacity 1 is serialized mode. What holds:

- Every accepted sequence ends in exactly one terminal output.
- A slot and its tokens are free the moment its sequence ends; the runner hears of it in the next plan's `release`.
- A cancel is applied before the next plan. One that comes before its Submit is remembered; a late one is dropped.
- The head of the queue is never overtaken by a later one of its priority because that needs fewer tokens.
- What is left of a group that has begun goes before everyone else, as its wait has no end but this one.
- When a step raises, its rows are recomputed from their tokens and tried one at a time beside the cleared ones, so
  that only the row which makes steps fail is failed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .messages import (
    Cancel,
    CancelReason,
    EngineStatistics,
    Finish,
    FinishReason,
    Output,
    RunnerStatistics,
    Submit,
    TokenLogprob,
)
from .pace import PrefillPace
from .plan import Admit, DecodeRow, PrefillChunk, StepPlan, StepResult
from .row import Row
from .states import Event, State

EARLY_CANCEL_S = 30.0
REMEMBERED_IDS = 4096
BEGUN = -(2**63)  # goes before every priority that a client may ask for


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_running` slots; `prefill_tokens` a step at most, in chunks that are multiples of `prefill_quantum` (0: as
    small as pays); `kv_tokens` that running rows may reserve (0: no limit)."""

    max_running: int
    prefill_tokens: int
    kv_tokens: int = 0
    prefill_quantum: int = 0


class Scheduler:
    """Waiting and running sequences of one owner. Not thread safe: only the owner calls it."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._rows: dict[str, Row] = {}
        self._waiting: list[tuple[int, int, Row]] = []
        self._running: dict[str, Row] = {}
        self._groups: dict[str, _Group] = {}
        self._release: list[str] = []
        self._early: OrderedDict[str, tuple[float, CancelReason]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._outputs: dict[Row, _Pending] = {}
        self._pace = PrefillPace(limits.prefill_tokens, limits.prefill_quantum)
        self._reserved = 0
        self._order = 0
        self._turn = 0
        self._counts = _Counts()

    # What arrives ------------------------------------------------------------------------------------------------

    def submit(self, request: Submit, now: float) -> None:
        """Queue a sequence. A live duplicate of its id is ignored: the one that runs is not touched (B4, B5)."""
        if request.id in self._rows:
            return
        self._ended.pop(request.id, None)
        self._order += 1
        row = Row(request=request, order=self._order, arrived=now)
        self._rows[row.id] = row
        self._group(row).live += 1
        if (early := self._early.pop(row.id, None)) is not None and now - early[0] <= EARLY_CANCEL_S:
            self._end(row, _cancelled(early[1]))
        elif not request.prompt:
            self._end(row, _error("invalid_request", "the prompt is empty: send at least one token"))
        elif self.limits.kv_tokens and row.reserved > self.limits.kv_tokens:
            self._end(row, _too_big(row, self.limits.kv_tokens))
        else:
            priority = BEGUN if self._group(row).started else request.priority
            heapq.heappush(self._waiting, (priority, row.order, row))

    def cancel(self, message: Cancel, now: float) -> None:
        """Take a sequence back. Idempotent; unknown ids are remembered for EARLY_CANCEL_S, ended ones dropped."""
        row = self._rows.get(message.id)
        if row is not None:
            self._end(row, _cancelled(message.reason))
        elif message.id not in self._ended:
            self._early[message.id] = (now, message.reason)
            _trim(self._early)

    def end_all(self, finish: Finish) -> tuple[Output, ...]:
        """End everything that lives, for a shutdown or a death; returns the last outputs."""
        for row in list(self._rows.values()):
            self._end(row, finish)
        return self.flush()

    # The step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """The next step's work: admissions, a share of prefill for each prompt, and every row that decodes."""
        self._turn += 1
        release, self._release = tuple(self._release), []
        self._admit_waiting(now)
        self._expire_waiting(now)
        active = self._active()
        joins = tuple(self._join(row) for row in active if not row.joined)
        chunks = self._prefill_chunks(active)
        decode = tuple(
            DecodeRow(id=row.id, token=row.last_token, position=len(row.tokens))
            for row in active
            if row.prefill_left == 0
        )
        self._counts.steps += 1
        return StepPlan(step=self._counts.steps, release=release, admit=joins, prefill=chunks, decode=decode)

    def apply(self, plan: StepPlan, result: StepResult) -> tuple[Output, ...]:
        """Take in what the runner did for `plan`; returns everything there is to tell since the last call."""
        self._observe(plan, result)
        for failure in result.failures:
            if (row := self._running.get(failure.id)) is not None:
                self._end(row, _error("engine_step_failed", failure.message))
        for chunk in plan.prefill:
            if (row := self._running.get(chunk.id)) is not None:
                self._prefilled(row)
        for gained in result.rows:
            if (row := self._running.get(gained.id)) is not None:
                self._gain(row, gained.tokens, gained.logprobs)
        return self.flush()

    def recover(self, plan: StepPlan, message: str) -> tuple[Output, ...]:
        """`plan` raised: fail the row that is to blame, or put its rows back and find out which one is (B7)."""
        self._counts.recovered_steps += 1
        rows = [self._running[i] for i in _row_ids(plan) if i in self._running]
        guilty = [row for row in rows if row.suspect]
        for row in rows:
            if row in guilty:
                self._end(row, _error("engine_step_failed", f"the step failed on this request: {message}"))
            else:
                row.rewind()
                row.suspect = not guilty
                self._release.append(row.id)
        return self.flush()

    def flush(self) -> tuple[Output, ...]:
        """Everything there is to tell since the last call."""
        outputs = tuple(pending.output(row.id) for row, pending in self._outputs.items())
        self._outputs = {}
        return outputs

    # What it says of itself ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a plan made now would hold anything for the runner."""
        return bool(self._rows or self._release)

    @property
    def live(self) -> int:
        return len(self._rows)

    def statistics(self, now: float, runner: RunnerStatistics, step_s: float = 0.0) -> EngineStatistics:
        """A frozen snapshot of counts and times."""
        waits = [now - row.arrived for _, _, row in self._waiting if row.live]
        count = self._counts
        return EngineStatistics(
            steps=count.steps,
            running=len(self._running),
            prefilling=sum(row.state is State.PREFILL for row in self._running.values()),
            waiting=len(waits),
            oldest_wait_s=max(waits, default=0.0),
            prompt_tokens=count.prompt_tokens,
            completion_tokens=count.completion_tokens,
            finished=count.finished,
            cancelled=count.cancelled,
            expired=count.expired,
            failed=count.failed,
            recovered_steps=count.recovered_steps,
            step_s=step_s,
            prefill_s=count.prefill_s,
            decode_s=count.decode_s,
            runner=runner,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where the books don't agree; when idle nothing may be left."""
        waiting = {row.id for _, _, row in self._waiting if row.live}
        _agree(waiting | self._running.keys() == self._rows.keys(), "each live row waits or runs")
        _agree(not waiting & self._running.keys(), "no row both waits and runs")
        _agree(len(self._running) <= self.limits.max_running, "no more rows than slots")
        _agree(self._reserved == sum(r.reserved for r in self._running.values()), "reserved tokens add up")
        _agree(sum(g.live for g in self._groups.values()) == len(self._rows), "groups count their rows")
        _agree(all(g.live > 0 for g in self._groups.values()), "no empty group is kept")

    # Inside ---------------------------------------------------------------------------------------------------------

    def _admit_waiting(self, now: float) -> None:
        if any(row.suspect for row in self._running.values()):
            return  # a newcomer in a suspect's trial could be the one to blame
        while self._waiting and len(self._running) < self.limits.max_running:
            row = self._waiting[0][2]
            if row.live and self.limits.kv_tokens and self._reserved + row.reserved > self.limits.kv_tokens:
                return
            heapq.heappop(self._waiting)
            if row.live:
                self._start(row, now)

    def _start(self, row: Row, now: float) -> None:
        row.on(Event.ADMIT)
        row.admitted = now
        row.turn = self._turn - 1  # behind nobody who is served in this step
        self._running[row.id] = row
        self._reserved += row.reserved
        self._begin_group(row)
        pending = self._pending(row)
        pending.admitted, pending.wait_s = True, now - row.arrived

    def _begin_group(self, row: Row) -> None:
        """The rest of its group, which may no longer be refused, goes first from now on."""
        group, key = self._group(row), _group_key(row)
        if not group.started and group.live > 1:
            self._waiting = [(BEGUN if _group_key(r) == key else p, order, r) for p, order, r in self._waiting]
            heapq.heapify(self._waiting)
        group.started = True

    def _expire_waiting(self, now: float) -> None:
        """End the waits that are over, except those of a request that has begun: it may not turn into an error (D2).

        What ended while it waited leaves the queue here.
        """
        over = [
            row
            for _, _, row in self._waiting
            if row.live and now - row.arrived >= row.request.max_wait_s and not self._group(row).started
        ]
        for row in over:
            self._end(row, Finish(reason=FinishReason.EXPIRED, code="text_generation_busy"))
        if any(not row.live for _, _, row in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[2].live]
            heapq.heapify(self._waiting)

    def _active(self) -> list[Row]:
        """The rows of the next step: all that run, but of the suspects only the first."""
        rows = list(self._running.values())
        suspect = next((row for row in rows if row.suspect), None)
        return [row for row in rows if not row.suspect or row is suspect]

    def _join(self, row: Row) -> Admit:
        row.joined = True
        return Admit(request=row.request, history=tuple(row.tokens))

    def _prefill_chunks(self, active: list[Row]) -> tuple[PrefillChunk, ...]:
        rows = [row for row in active if row.prefill_left > 0]
        if not rows:
            return ()
        rows.sort(key=lambda row: (row.turn, row.order))
        shares = self._pace.split([row.prefill_left for row in rows], decoding=len(active) - len(rows))
        return tuple(self._chunk(row, count) for row, count in zip(rows, shares, strict=True) if count)

    def _chunk(self, row: Row, count: int) -> PrefillChunk:
        chunk = PrefillChunk(id=row.id, start=row.cached, tokens=row.upcoming(count))
        row.cached += count
        row.turn = self._turn
        self._counts.prompt_tokens += count
        return chunk

    def _prefilled(self, row: Row) -> None:
        self._pending(row).prompt_done = min(row.cached, len(row.request.prompt))

    def _gain(self, row: Row, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        row.suspect = False
        out = self._pending(row)
        if row.state is State.PREFILL:
            row.on(Event.PROMPT_DONE)
            self._counts.prompt_tokens += 1  # the last one went in as a decode row
            out.prompt_done = len(row.request.prompt)
        for i, token in enumerate(tokens):
            finish = row.take(token)
            row.cached += 1
            self._counts.completion_tokens += 1
            out.tokens.append(token)
            out.logprobs.extend(logprobs[i : i + 1])
            if finish is not None:
                self._end(row, finish)
                return

    def _end(self, row: Row, finish: Finish) -> None:
        row.on(Event.END)
        self._pending(row).finish = finish
        self._counts.ended(finish.reason)
        del self._rows[row.id]
        self._ended[row.id] = None
        _trim(self._ended)
        if self._running.pop(row.id, None) is not None:
            self._reserved -= row.reserved
            if row.joined:
                self._release.append(row.id)
        group = self._group(row)
        group.live -= 1
        if group.live == 0:
            del self._groups[_group_key(row)]

    def _observe(self, plan: StepPlan, result: StepResult) -> None:
        prefilled = sum(len(chunk.tokens) for chunk in plan.prefill)
        self._pace.observe(prefill_tokens=prefilled, prefill_s=result.prefill_s, decode_s=result.decode_s)
        self._counts.prefill_s += result.prefill_s
        self._counts.decode_s += result.decode_s

    def _group(self, row: Row) -> _Group:
        return self._groups.setdefault(_group_key(row), _Group())

    def _pending(self, row: Row) -> _Pending:
        return self._outputs.setdefault(row, _Pending())


@dataclass(slots=True)
class _Group:
    live: int = 0
    started: bool = False


@dataclass(slots=True)
class _Counts:
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    recovered_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def ended(self, reason: FinishReason) -> None:
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self.finished += 1
            case FinishReason.CANCELLED:
                self.cancelled += 1
            case FinishReason.EXPIRED:
                self.expired += 1
            case _:
                self.failed += 1


class _Pending:
    """What is to be told about one row in the next report."""

    __slots__ = ("admitted", "finish", "logprobs", "prompt_done", "tokens", "wait_s")

    def __init__(self) -> None:
        self.admitted = False
        self.wait_s = 0.0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_done: int | None = None
        self.finish: Finish | None = None

    def output(self, id_: str) -> Output:
        return Output(
            id=id_,
            admitted=self.admitted,
            wait_s=self.wait_s,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            prompt_tokens_done=self.prompt_done,
            finish=self.finish,
        )


def _group_key(row: Row) -> str:
    return row.request.group or row.id


def _row_ids(plan: StepPlan) -> Iterable[str]:
    """Each row that takes part in `plan`, once."""
    admitted = (admit.request.id for admit in plan.admit)
    return dict.fromkeys((*admitted, *(c.id for c in plan.prefill), *(d.id for d in plan.decode)))


def _cancelled(reason: CancelReason) -> Finish:
    if reason is CancelReason.STOP:
        return Finish(reason=FinishReason.STOP)
    return Finish(reason=FinishReason.CANCELLED, code=reason.value)


def _error(code: str, message: str) -> Finish:
    return Finish(reason=FinishReason.ERROR, code=code, message=message)


def _too_big(row: Row, limit: int) -> Finish:
    needs = f"prompt and completion may come to {row.reserved} tokens, and the cache holds {limit}"
    return _error("context_length_exceeded", f"{needs}: ask for fewer tokens, or raise the server's memory budget")


def _trim(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > REMEMBERED_IDS:
        remembered.popitem(last=False)


def _agree(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"scheduler books: {what}")
