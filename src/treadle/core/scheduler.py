"""The scheduler: plans each step and applies its result. Pure: time comes in, plans and outputs go out.

Within a priority tenants are served in turn (`queue`), each of them first come, first served, into `max_running` slots;
capacity 1 is serialized mode. What holds:

- Every accepted sequence ends in exactly one terminal output.
- A slot and its tokens are free the moment its sequence ends; the runner hears of it before the next plan (`departed`).
- A cancel is applied before the next plan. One that comes before its Submit is remembered; a late one is dropped.
- The head of the queue is never overtaken by another of its tenant and priority because that needs fewer tokens.
- What is left of a group that has begun goes before everyone else, as its wait has no end but this one.
- Plans may be made while earlier ones are in flight. Each is applied to the rows that it was made for, whatever has
  become of their ids since: what a step computed for a row that has ended is dropped.
- Where rows outgrow the cache, the newest of the worst priority are preempted. Ranks never change, so the first gets on
  and ends. Nobody is preempted while a step in flight may still end somebody.
- When a step raises, its rows are recomputed from their tokens and tried one at a time beside the cleared ones, so
  that only the row which makes steps fail is failed. A trial has nothing else in flight. Planning that raises is
  treated alike (`recover_planning`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .block_budget import BlockBudget, OptimisticAdmission, TokenReservations
from .early_cancels import EarlyCancels
from .finishes import cancelled, failed, too_big
from .messages import (
    Cancel,
    EngineStatistics,
    Finish,
    FinishReason,
    Output,
    RunnerStatistics,
    Sharing,
    Submit,
)
from .outputs import Outputs
from .plan import RowTokens, StepPlan, StepResult
from .plan_builder import PlanBuilder, Reuse, no_reuse
from .preemption import decode_demand, select_victims
from .prefill_budget import Charge, PrefillBudget
from .queue import Queue
from .scheduler_counters import SchedulerCounters
from .sequence import Sequence
from .states import Event, State

WORTH_WAITING = 64  # prompt tokens: fewer are sooner computed again than waited for
STUCK_PLANS = 8  # in a row, without work for the rows that run: the memory they need does not come free


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_running` slots; `prefill_tokens` a step at most, in chunks that are multiples of `prefill_quantum` (0: as
    small as pays), as many as one of `chunk_sizes` says where there are any. Cache memory is `kv_blocks` blocks of
    `kv_block` tokens; where there are 0, running rows may reserve `kv_tokens` tokens (0: no limit). `prefix_cache`: the
    runner reuses prompts, those of running rows as `sharing` says."""

    max_running: int
    prefill_tokens: int
    kv_tokens: int = 0
    prefill_quantum: int = 0
    chunk_sizes: tuple[int, ...] = ()
    kv_block: int = 1
    kv_blocks: int = 0
    prefix_cache: bool = False
    sharing: Sharing = Sharing.COPIED

    @property
    def capacity(self) -> int:
        """The most tokens that one row may come to; 0: any number."""
        return self.kv_blocks * self.kv_block or self.kv_tokens


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A plan that is started or about to be, and the rows that its ids meant."""

    plan: StepPlan
    rows: dict[str, Sequence]
    bill: Charge


class Scheduler:
    """Waiting and running sequences of one owner. Not thread safe: only the owner calls it.

    `reuse` says how many tokens of a row that joins the runner holds already (`Runner.reuse`).
    """

    def __init__(self, limits: SchedulerLimits, reuse: Reuse = no_reuse) -> None:
        self.limits = limits
        worth = WORTH_WAITING if limits.prefix_cache else 0
        self._rows: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._queue = Queue()
        self._absent = EarlyCancels()
        self._flights: deque[_InFlightStep] = deque()
        self._departed: list[str] = []
        self._outputs = Outputs()
        self._pace = PrefillBudget(limits.prefill_tokens, limits.prefill_quantum, limits.chunk_sizes)
        self._order = 0
        self._stuck = 0
        self._counts = SchedulerCounters()
        self._composer = PlanBuilder(
            reuse, self._pace, self._counts, self._outputs, worth_waiting=worth, sharing=limits.sharing
        )

    # What arrives ------------------------------------------------------------------------------------------------

    def submit(self, request: Submit, now: float) -> None:
        """Queue a sequence. A live duplicate of its id is ignored: the one that runs is not touched (B4, B5)."""
        if request.id in self._rows:
            return
        self._order = request.arrival or self._order + 1
        row = Sequence.of(request, order=self._order, now=now)
        self._rows[row.id] = row
        self._queue.enter(row)
        if (early := self._absent.submitted(row.id, now)) is not None:
            self._end(row, cancelled(early))
        elif not request.prompt:
            self._end(row, failed("invalid_request", "the prompt is empty: send at least one token"))
        elif 0 < self.limits.capacity < row.reserved:
            self._end(row, too_big(row, self.limits.capacity))
        else:
            self._queue.push(row)

    def cancel(self, message: Cancel, now: float) -> None:
        """Take a sequence back. Idempotent; unknown ids are remembered for EARLY_CANCEL_S, ended ones dropped."""
        row = self._rows.get(message.id)
        if row is not None:
            self._end(row, cancelled(message.reason))
        else:
            self._absent.cancelled(message.id, message.reason, now)

    def end_all(self, finish: Finish) -> tuple[Output, ...]:
        """End everything that lives, for a shutdown or a death; returns the last outputs. What is in flight is not
        waited for."""
        for row in list(self._rows.values()):
            self._end(row, finish)
        self._flights.clear()
        return self.flush()

    # The step ----------------------------------------------------------------------------------------------------

    def departed(self) -> tuple[str, ...]:
        """Rows that the runner is to release before the next plan is made, as that asks what room there is, and what is
        cached for ids that may come again. Those that were not asked for are in the plan's `release`."""
        departed, self._departed = tuple(self._departed), []
        return departed

    def plan(self, now: float, room: int | None = None) -> StepPlan:
        """The next step's work: admissions, a share of prefill for each prompt, and every row that decodes.

        `room` are the blocks that no row holds. A plan with work is in flight from now on. One without, while others
        are, may mean that they have to be applied first.
        """
        space = BlockBudget(self.limits.kv_block, room if self.limits.kv_blocks else None)
        running = self._running.values()
        claimed = decode_demand(running, self._counts.steps, space)
        short = claimed.short(space)
        if self._flights and (short > 0 or self._on_trial()):
            return StepPlan(step=self._counts.steps + 1, release=self.departed())
        if not self._preempt(select_victims(running, short, space), now):
            self._admit_waiting(now, space)
        self._expire_waiting(now)
        release = tuple(self._departed)
        plan = self._composer.compose(self._counts.steps + 1, release, running, claimed, space)
        self._departed = []  # not before: `compose` may raise, and they have to be released all the same
        self._take_off(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> tuple[Output, ...]:
        """Take in what the runner did for `plan`, the oldest in flight or one without work; returns everything there is
        to tell since the last call."""
        if plan.idle:
            return self.flush()
        flight = self._flights.popleft()
        _agree(flight.plan is plan, "plans are applied in their order")
        self._observe(flight, result)
        for failure in result.failures:
            if (row := flight.rows.get(failure.id)) is not None and row.live:
                self._end(row, failed("engine_step_failed", failure.message))
        for scores in result.scores:
            if (row := flight.rows[scores.id]).live:
                self._outputs.of(row).prompt_logprobs += row.score(scores.logprobs)
        for admit in plan.admit:
            self._filled(flight.rows[admit.request.id], admit.cached)
        for chunk in plan.prefill:
            self._filled(flight.rows[chunk.id], chunk.start + len(chunk.tokens))
        gained = {row.id: row for row in result.rows}
        for decode in plan.decode:
            if (row := flight.rows[decode.id]).live:
                _agree(decode.id in gained, "a row that decodes gains or fails")
                self._gain(row, gained[decode.id])
        return self.flush()

    def recover(self, plan: StepPlan, message: str) -> tuple[Output, ...]:
        """`plan` raised, and with those after it it is void: fail the row that is to blame, or put their rows back and
        find out which one is (B7)."""
        self._counts.recovered_steps += 1
        rows = [row for row in self._void(plan) if row.live]
        guilty = [row for row in rows if row.suspect]
        for row in rows:
            if row in guilty:
                self._end(row, failed("engine_step_failed", f"the step failed on this request: {message}"))
            else:
                row.rewind()
                row.suspect = not guilty
                self._departed.append(row.id)
        return self.flush()

    def recover_planning(self, message: str, row_id: str | None = None) -> tuple[Output, ...]:
        """Planning raised, while no step is in flight: fail the row to blame, or find out which one it is (B7).

        That is `row_id` where the fault names a row, else the suspect whose turn it is. All others that run are
        recomputed from their tokens, as some of them may have joined in the plan that was not made.
        """
        _agree(not self._flights, "a plan is recovered with nothing in flight")
        self._counts.recovered_steps += 1
        running = list(self._running.values())
        guilty = self._running.get(row_id) if row_id else next((row for row in running if row.suspect), None)
        for row in running:
            self._departed.append(row.id)
            if row is guilty:
                row.joined = False  # it is among the departed
                self._end(row, failed("engine_step_failed", f"planning failed on this request: {message}"))
            else:
                row.rewind()
                row.suspect = row.suspect or guilty is None
        return self.flush()

    def flush(self) -> tuple[Output, ...]:
        """Everything there is to tell since the last call."""
        return self._outputs.flush()

    # What it says of itself ---------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Plans with work that are neither applied nor recovered."""
        return len(self._flights)

    @property
    def oldest(self) -> StepPlan:
        """Of the plans in flight."""
        return self._flights[0].plan

    @property
    def joined(self) -> Iterator[int]:
        """Arrival numbers of the rows that the runner has, or gets with the plan that was made last."""
        return (row.order for row in self._running.values() if row.joined)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to plan, to apply or to release."""
        return bool(self._rows or self._departed or self._flights)

    @property
    def live(self) -> int:
        return len(self._rows)

    def statistics(self, now: float, runner: RunnerStatistics, step_s: float = 0.0) -> EngineStatistics:
        """A frozen snapshot of counts and times."""
        waits_s = [now - row.arrived for row in self._queue.waiting]
        return self._counts.statistics(self._running.values(), waits_s, runner, step_s)

    def _on_trial(self) -> bool:
        return any(row.suspect for row in self._running.values())

    def check_integrity(self) -> None:
        """Raise AssertionError where the books don't agree; when idle nothing may be left."""
        waiting = {row.id for row in self._queue.waiting}
        decoding = [flight.rows[decode.id] for flight in self._flights for decode in flight.plan.decode]
        _agree(waiting | self._running.keys() == self._rows.keys(), "each live row waits or runs")
        _agree(not waiting & self._running.keys(), "no row both waits and runs")
        _agree(len(self._running) <= self.limits.max_running, "no more rows than slots")
        _agree(self._queue.check(len(self._rows)), "groups count their rows")
        _agree(all(row.ahead == decoding.count(row) for row in self._rows.values()), "rows count what is in flight")

    # Inside ---------------------------------------------------------------------------------------------------------

    def _take_off(self, plan: StepPlan) -> None:
        """A plan with work is in flight. One without, again and again, is the end of the first row that waits for
        memory: none will come free."""
        if not plan.idle:
            self._counts.steps += 1
            rows = {id_: self._running[id_] for id_ in _row_ids(plan)}
            self._flights.append(_InFlightStep(plan, rows, self._bill(plan)))
        stuck = self._running and not (self._flights or plan.release)
        self._stuck = self._stuck + 1 if stuck else 0
        if self._stuck > STUCK_PLANS:
            first = min(self._running.values(), key=lambda row: row.rank)
            self._end(first, failed("engine_step_failed", "the cache has no room for its next token, and gets none"))

    # Who comes and goes --------------------------------------------------------------------------------------------

    def _admit_waiting(self, now: float, space: BlockBudget) -> None:
        running = self._running.values()
        if len(running) >= self.limits.max_running or self._queue.head(running) is None or self._on_trial():
            return  # in a suspect's trial a newcomer could be the one to blame
        promises = self._promises(space)
        while len(running) < self.limits.max_running and (row := self._queue.head(running)) is not None:
            if not promises.admits(row):
                return
            self._queue.pop(row)
            self._start(row, now)

    def _promises(self, space: BlockBudget) -> OptimisticAdmission | TokenReservations:
        running = self._running.values()
        if not self.limits.kv_blocks:
            return TokenReservations(self.limits.kv_tokens, running)
        return OptimisticAdmission(space, running, holding=self._composer.holding)

    def _start(self, row: Sequence, now: float) -> None:
        row.on(Event.ADMIT)
        row.turn = self._counts.steps  # behind nobody who is served in this step
        self._running[row.id] = row
        if not row.told:
            row.told = True
            pending = self._outputs.of(row)
            pending.admitted, pending.wait_s = True, now - row.arrived

    def _expire_waiting(self, now: float) -> None:
        """End the waits that are over. What ended while it waited leaves the queue here."""
        for row in self._queue.expired(now):
            self._end(row, Finish(reason=FinishReason.EXPIRED, code="text_generation_busy"))
        self._queue.sweep()

    def _preempt(self, rows: list[Sequence], now: float) -> bool:
        """Send `rows` back to wait for their memory; whether there are any."""
        for row in rows:
            row.preempt(now)
            del self._running[row.id]
            self._departed.append(row.id)
            self._queue.push(row)
            self._counts.preempted += 1
        return bool(rows)

    def _end(self, row: Sequence, finish: Finish) -> None:
        row.on(Event.END)
        self._outputs.of(row).finish = finish
        self._counts.ended(finish.reason)
        del self._rows[row.id]
        self._absent.ended(row.id)
        if self._running.pop(row.id, None) is not None and row.joined:
            self._departed.append(row.id)
        self._queue.leave(row)

    def _void(self, plan: StepPlan) -> dict[Sequence, None]:
        """Take `plan` and those after it out of flight; their rows, each once."""
        rows: dict[Sequence, None] = {}
        while True:
            flight = self._flights.pop()
            self._pace.void(flight.bill)
            rows = dict.fromkeys((*flight.rows.values(), *rows))
            if flight.plan is plan:
                return rows

    # What became of a step -----------------------------------------------------------------------------------------

    def _bill(self, plan: StepPlan) -> Charge:
        chunks = {chunk.id: len(chunk.tokens) for chunk in plan.prefill}
        return self._pace.bill(sum(chunks.values()), beside=any(decode.id not in chunks for decode in plan.decode))

    def _observe(self, flight: _InFlightStep, result: StepResult) -> None:
        behind = self._flights[0].bill if self._flights else None
        self._pace.observe(flight.bill, prefill_s=result.prefill_s, decode_s=result.decode_s, behind=behind)
        self._counts.prefill_s += result.prefill_s
        self._counts.decode_s += result.decode_s

    def _filled(self, row: Sequence, cached: int) -> None:
        """A step has brought what is cached of `row` to `cached` tokens."""
        if not row.live:
            return
        row.kept = cached
        self._outputs.of(row).prompt_done = min(cached, len(row.request.prompt))
        if row.request.max_tokens == 0 and cached == row.known - 1:
            self._end(row, Finish(reason=FinishReason.LENGTH))

    def _gain(self, row: Sequence, gained: RowTokens) -> None:
        tokens = gained.tokens
        row.suspect = False
        row.ahead -= 1
        _agree(len(tokens) == 1 or not row.ahead, "several tokens a step are not planned ahead of")
        out = self._outputs.of(row)
        if row.state is State.PREFILL:
            row.on(Event.PROMPT_DONE)
            self._counts.prompt_tokens += 1  # the last one went in as a decode row
            out.prompt_done = len(row.request.prompt)
        row.cached += len(tokens) - 1
        finish, before = None, len(row.tokens)
        for token in tokens:
            if (finish := row.take(token)) is not None:
                break
        count = len(row.tokens) - before  # what comes after the end is dropped
        self._counts.completion_tokens += count
        out.tokens += tokens[:count]
        out.logprobs += gained.logprobs[:count]
        if finish is not None:
            self._end(row, finish)


def _row_ids(plan: StepPlan) -> Iterable[str]:
    """Each row that takes part in `plan`, once."""
    admitted = (admit.request.id for admit in plan.admit)
    return dict.fromkeys((*admitted, *(c.id for c in plan.prefill), *(d.id for d in plan.decode)))


def _agree(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"scheduler books: {what}")
