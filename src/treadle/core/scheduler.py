"""Scheduler: plans each step and applies its result. Pure: time is an argument, plans and outputs are returned.

Tenants of one priority are served in turn, each FIFO (`queue`), into `max_running` slots. Invariants:

- Every accepted sequence ends with exactly one terminal output.
- A slot and its tokens are free as soon as its sequence ends. The runner releases it before the next plan.
- A cancel is applied before the next plan. One that precedes its Submit is remembered; a late one is dropped.
- The head of the queue is never overtaken by a sequence of its tenant and priority that needs fewer tokens.
- The rest of a group that has started goes before all others, as it can't expire.
- Plans may be made while earlier ones are in flight. Each is applied to the sequences that it was made for, even if
  their ids have been used again since; what a step computed for a sequence that has ended is dropped.
- When sequences outgrow the cache, the newest of the worst priority are preempted. Ranks never change, so the best-
  ranked one always ends. None is preempted while a step in flight may still end another.
- A sequence with a constraint is queued when its grammar is compiled; until then it is held, and others pass it.
- When a step raises, its sequences are recomputed from their tokens and become suspects. Suspects run one at a time
  beside the others, with nothing else in flight, until the one that makes steps raise is found and failed. Planning
  that raises is treated alike (`recover_planning`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from .arrivals import refusal_of
from .block_budget import BlockBudget, OptimisticAdmission, TokenReservations
from .chunk_limits import Work
from .draft_budget import DraftBudget
from .early_cancels import EarlyCancels
from .encodings import Encodings, HasFeatures, image_limits, no_features
from .finishes import cancelled, failed
from .grammar_state import GrammarLookup, no_grammars
from .grammar_wait import GrammarWait
from .inflight_step import InFlightStep
from .integrity import check, check_books
from .messages import Cancel, Finish, FinishReason, Output, Submit
from .outputs import Outputs
from .plan import StepPlan, StepResult
from .plan_builder import MatchPrefix, PlanBuilder, no_prefix
from .preemption import decode_demand, select_victims
from .prefill_budget import PrefillBudget
from .queue import Queue
from .scheduler_counters import SchedulerCounters
from .scheduler_limits import SchedulerLimits as SchedulerLimits
from .sequence import Sequence
from .spec_prefill import MatchScored, SpecPrefill, not_scored
from .speculation import Speculation
from .states import Event
from .statistics import EngineStatistics, RunnerStatistics
from .step_accounting import StepAccounting
from .step_times import Charge

MIN_SHARED_TOKENS = 64  # of a prompt: fewer are computed again sooner than waited for
MAX_STUCK_PLANS = 8  # in a row, without work though sequences run: their memory never comes free


class Scheduler:
    """Waiting and running sequences of one owner. Not thread safe: only the owner calls it.

    `match` returns how many tokens of a joining sequence the runner has cached (`Runner.match_prefix`), `grammar` the
    state of a constraint's grammar (`Runner.grammar_state`). `drafts` chooses the draft tokens of each step; without it
    sequences have as many as the limits say. `match_scored` returns how many tokens of a prompt the scorer has cached
    (`Runner.match_scored`), `features` whether the runner keeps an image's (`Runner.has_features`).
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        match: MatchPrefix = no_prefix,
        grammar: GrammarLookup = no_grammars,
        drafts: DraftBudget | None = None,
        match_scored: MatchScored = not_scored,
        features: HasFeatures = no_features,
    ) -> None:
        self.limits = limits
        min_shared = MIN_SHARED_TOKENS if limits.prefix_cache else 0
        self._sequences: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._queue = Queue()
        self._early_cancels = EarlyCancels()
        self._in_flight: deque[InFlightStep] = deque()
        self._released_ids: list[str] = []
        self._outputs = Outputs()
        self._grammar_wait = GrammarWait(self._queue, grammar, self._outputs)
        self._spec_prefill = SpecPrefill(limits.spec_prefill, self._outputs, match_scored)
        others = {**self._spec_prefill.limits(limits.prefill_tokens), Work.IMAGES: image_limits(limits.vision)}
        self._prefill_budget = PrefillBudget(
            limits.prefill_tokens,
            limits.prefill_quantum,
            limits.chunk_sizes,
            others,
            {Work.PROMPTS: limits.chunks, Work.SCORING: limits.spec_prefill.chunks},
        )
        self._order = 0
        self._stuck = 0
        self._counters = SchedulerCounters()
        self._speculation = Speculation(drafts, lookahead=limits.lookahead, resolved=limits.drafts_resolved)
        self._encodings = Encodings(limits.vision, features)
        self._accounting = StepAccounting(
            self._outputs,
            self._counters,
            self._prefill_budget,
            self._spec_prefill,
            self._speculation,
            self._encodings,
        )
        self._plan_builder = PlanBuilder(
            match,
            self._prefill_budget,
            self._counters,
            self._outputs,
            self._spec_prefill,
            min_shared=min_shared,
            sharing=limits.sharing,
            draft_tokens=limits.draft_tokens,
            encodings=self._encodings,
            whole_images=limits.vision.whole,
        )

    # Arrivals ---------------------------------------------------------------------------------------------------

    def submit(self, request: Submit, now: float) -> None:
        """Queue a sequence. A duplicate of a live id is ignored (B4, B5)."""
        if request.id in self._sequences:
            return
        self._order = request.arrival or self._order + 1
        seq = Sequence.of(request, order=self._order, now=now)
        self._sequences[seq.id] = seq
        self._queue.add(seq)
        if (early := self._early_cancels.submitted(seq.id, now)) is not None:
            self._end(seq, cancelled(early))
        elif (refusal := refusal_of(seq, self.limits)) is not None:
            self._end(seq, refusal)
        else:
            self._spec_prefill.arrived(seq)
            self._grammar_wait.enqueue(seq)

    def cancel(self, message: Cancel, now: float) -> None:
        """Cancel a sequence. Idempotent; an unknown id is remembered for EARLY_CANCEL_S, an ended one ignored."""
        seq = self._sequences.get(message.id)
        if seq is not None:
            self._end(seq, cancelled(message.reason))
        else:
            self._early_cancels.cancelled(message.id, message.reason, now)

    def end_all(self, finish: Finish) -> tuple[Output, ...]:
        """End all sequences, for a shutdown or a death, without waiting for steps in flight. Return their outputs."""
        for seq in list(self._sequences.values()):
            self._end(seq, finish)
        self._in_flight.clear()
        return self.flush()

    # Steps -------------------------------------------------------------------------------------------------------

    def take_released_ids(self) -> tuple[str, ...]:
        """Take the ids of sequences that the runner is to release: before a plan is made, as that counts free blocks,
        and before it is started, as it may have preempted some."""
        ids, self._released_ids = tuple(self._released_ids), []
        return ids

    def plan(self, now: float, free_blocks: int | None = None) -> StepPlan:
        """Plan the next step: admissions, a chunk of each prompt, and all sequences that decode.

        `free_blocks` are those that no sequence holds. A plan with work is in flight from now on. An idle one, while
        others are in flight, may mean that those have to be applied first.
        """
        budget = BlockBudget(self.limits.kv_block, free_blocks if self.limits.kv_blocks else None)
        if self._queue.held:
            for seq, message in self._grammar_wait.ask():
                self._end(seq, failed("invalid_grammar", message))
        running = self._running.values()
        demand = decode_demand(running, self._counters.steps, budget, whole_images=self.limits.vision.whole)
        shortfall = demand.shortfall(budget)
        if self._in_flight and (shortfall > 0 or self._has_suspects() or self._speculation.blocks(self._in_flight)):
            return StepPlan(step=self._counters.steps + 1)
        if not self._preempt(select_victims(running, shortfall, budget), now):
            self._admit_waiting(now, budget)
        self._expire_waiting(now)
        in_flight = bool(self._in_flight)
        drafts = self._speculation.choose(running, demand, in_flight=in_flight)
        if drafts and in_flight:
            return StepPlan(step=self._counters.steps + 1)
        plan, charge = self._plan_builder.build(self._counters.steps + 1, running, demand, budget, drafts)
        if self._speculation.proposes(plan):
            plan = replace(plan, propose=True)
        if not plan.idle:
            self._speculation.planned(plan, now, follows=in_flight)
        self._launch(plan, charge)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> tuple[Output, ...]:
        """Apply the runner's result for `plan`, the oldest in flight or an idle one. Return all unreported outputs."""
        if plan.idle:
            return self.flush()
        step = self._in_flight.popleft()
        check(step.plan is plan, "plans are applied in their order")
        self._accounting.times(step, result, self._in_flight[0].charge if self._in_flight else None)
        for id_ in result.evicted:
            self._recompute(id_, (step, *self._in_flight))
        for failure in result.failures:
            if (seq := step.sequences.get(failure.id)) is not None and seq.live:
                self._end(seq, failed(failure.code, failure.message))
        for scores in result.scores:
            if (seq := step.sequences[scores.id]).live:
                self._accounting.scored(seq, scores)
        for kept in result.kept:
            if (scored := step.sequences.get(kept.id)) is not None and scored.live:
                self._spec_prefill.settle(scored, kept, self._running.values())
        for vector in result.vectors:
            if (seq := step.sequences[vector.id]).live:
                self._end(seq, Finish(reason=FinishReason.STOP, vector=vector.data))
        for trial in result.trials:
            if (tried := step.sequences.get(trial.id)) is not None and tried.live:
                self._speculation.tried(tried, trial.match, trial.drafted, trial.accepted)
        sequence = step.sequences.get
        for id_, count in plan.computed:
            if (seq := sequence(id_)) is not None and seq.live:
                self._end_if(seq, self._accounting.prefilled(seq, count))
        gained = {row.id: row for row in result.rows}
        for decode in plan.decode:
            if (seq := sequence(decode.id)) is not None and seq.live:
                check(decode.id in gained, "a sequence that decodes gains or fails")
                self._end_if(seq, self._accounting.decoded(seq, decode.drafts, gained[decode.id]))
        return self.flush()

    def recover(self, plan: StepPlan, message: str) -> tuple[Output, ...]:
        """Discard `plan`, which raised, and those after it. Fail the sequence to blame, or rewind them all to find it
        (B7)."""
        self._counters.recovered_steps += 1
        seqs = [seq for seq in self._discard_from(plan) if seq.live]
        guilty = [seq for seq in seqs if seq.suspect]
        for seq in seqs:
            if seq in guilty:
                self._end(seq, failed("engine_step_failed", f"the step failed on this request: {message}"))
            else:
                self._rewind(seq)
                seq.suspect = not guilty
        return self.flush()

    def recover_planning(self, message: str, id_: str | None = None) -> tuple[Output, ...]:
        """Recover from planning that raised, with no step in flight: fail the sequence to blame, or find it (B7).

        That is `id_` if given, else the suspect whose turn it was. All other running sequences are recomputed, as the
        books of the plan that was not made are void.
        """
        check(not self._in_flight, "a plan is recovered with nothing in flight")
        self._counters.recovered_steps += 1
        running = list(self._running.values())
        guilty = self._running.get(id_) if id_ else next((seq for seq in running if seq.suspect), None)
        for seq in running:
            if seq is guilty:
                seq.joined = False  # its id is released whether it has joined or not
                self._released_ids.append(seq.id)
                self._end(seq, failed("engine_step_failed", f"planning failed on this request: {message}"))
            else:
                self._rewind(seq)
                seq.suspect = seq.suspect or guilty is None
        return self.flush()

    def flush(self) -> tuple[Output, ...]:
        """Return all unreported outputs."""
        return self._outputs.flush()

    # State ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Number of plans that are neither applied nor recovered."""
        return len(self._in_flight)

    @property
    def oldest_plan(self) -> StepPlan:
        """The oldest plan in flight."""
        return self._in_flight[0].plan

    @property
    def exposed_arrivals(self) -> Iterator[int]:
        """Arrival numbers of the sequences that the runner has, those of the last plan included, and of those whose
        grammars it compiles."""
        yield from (seq.order for seq in self._queue.held)
        yield from (seq.order for seq in self._running.values() if seq.joined)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to plan, to apply or to release. Sequences that wait for grammars are nothing to do
        once those were asked for."""
        others = len(self._sequences) > len(self._queue.held)
        return bool(others or self._grammar_wait.unasked or self._released_ids or self._in_flight)

    @property
    def next_expiry(self) -> float | None:
        """The time at which the next sequence that waits for its grammar expires, if any does."""
        return self._queue.next_expiry

    @property
    def live(self) -> int:
        return len(self._sequences)

    def statistics(self, now: float, runner: RunnerStatistics, step_s: float = 0.0) -> EngineStatistics:
        """Return a snapshot of counts and times."""
        waits_s = [now - seq.arrived for seq in self._queue.waiting]
        running, held = self._running.values(), len(self._queue.held)
        speculation = self._speculation.statistics(busy=bool(running))
        spec_prefill, vision = self._spec_prefill.statistics(running), self._encodings.statistics()
        return self._counters.statistics(running, waits_s, held, speculation, spec_prefill, vision, runner, step_s)

    def _has_suspects(self) -> bool:
        return any(seq.suspect for seq in self._running.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if the books disagree."""
        check_books(self._sequences, self._running, self._queue, self._in_flight, self.limits.max_running)

    # Planning -------------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan, charge: Charge) -> None:
        """Record `plan` as in flight. After too many idle ones, end the first sequence that waits for memory: no block
        will come free."""
        if not plan.idle:
            self._counters.steps += 1
            sequences = {id_: self._running[id_] for id_ in plan.sequence_ids}
            self._in_flight.append(InFlightStep(plan, sequences, charge))
        stuck = self._running and not (self._in_flight or self._released_ids)
        self._stuck = self._stuck + 1 if stuck else 0
        if self._stuck > MAX_STUCK_PLANS:
            first = min(self._running.values(), key=lambda seq: seq.rank)
            self._end(first, failed("engine_step_failed", "the cache has no room for its next token, and gets none"))

    # Starts and ends -----------------------------------------------------------------------------------------------

    def _admit_waiting(self, now: float, budget: BlockBudget) -> None:
        running = self._running.values()
        if len(running) >= self.limits.max_running or self._queue.head(running) is None or self._has_suspects():
            return  # beside a suspect, a newcomer could be the one to blame
        admission = self._admission_policy(budget)
        while len(running) < self.limits.max_running and (seq := self._queue.head(running)) is not None:
            if not admission.admits(seq):
                return
            self._queue.pop(seq)
            self._admit(seq, now)

    def _admission_policy(self, budget: BlockBudget) -> OptimisticAdmission | TokenReservations:
        running = self._running.values()
        if not self.limits.kv_blocks:
            return TokenReservations(self.limits.kv_tokens, running)
        return OptimisticAdmission(budget, running, shares_blocks=self._plan_builder.shares_blocks)

    def _admit(self, seq: Sequence, now: float) -> None:
        seq.on(Event.ADMIT)
        seq.last_prefill_step = self._counters.steps  # not behind those served in this step
        self._running[seq.id] = seq
        if not seq.admitted_reported:
            seq.admitted_reported = True
            pending = self._outputs.of(seq)
            pending.admitted, pending.wait_s = True, now - seq.arrived

    def _expire_waiting(self, now: float) -> None:
        """End sequences that have waited too long, and drop queue entries of ended ones."""
        for seq in self._queue.expired(now):
            self._end(seq, Finish(reason=FinishReason.EXPIRED, code="text_generation_busy"))
        self._queue.sweep()

    def _preempt(self, seqs: list[Sequence], now: float) -> bool:
        """Preempt `seqs`. Return whether there are any."""
        for seq in seqs:
            self._encodings.leave(seq)
            seq.preempt(now)
            del self._running[seq.id]
            self._released_ids.append(seq.id)
            self._grammar_wait.enqueue(seq)
            self._counters.preempted += 1
        return bool(seqs)

    def _end_if(self, seq: Sequence, finish: Finish | None) -> None:
        if finish is not None:
            self._end(seq, finish)

    def _end(self, seq: Sequence, finish: Finish) -> None:
        seq.on(Event.END)
        self._outputs.of(seq).finish = finish
        self._counters.count_finish(finish.reason)
        del self._sequences[seq.id]
        self._early_cancels.ended(seq.id)
        self._encodings.leave(seq)
        if self._running.pop(seq.id, None) is not None and seq.joined:
            self._released_ids.append(seq.id)
        self._queue.remove(seq)

    def _rewind(self, seq: Sequence) -> None:
        """Compute `seq` again from its tokens, once the runner has released it."""
        self._encodings.leave(seq)
        seq.rewind()
        self._released_ids.append(seq.id)

    def _discard_from(self, plan: StepPlan) -> dict[Sequence, None]:
        """Take `plan` and all after it out of flight. Return their sequences, each once."""
        seqs: dict[Sequence, None] = {}
        while True:
            step = self._in_flight.pop()
            self._prefill_budget.void(step.charge)
            self._encodings.void(step.plan, step.sequences)
            seqs = dict.fromkeys((*step.sequences.values(), *seqs))
            if step.plan is plan:
                return seqs

    def _recompute(self, id_: str, steps: Iterable[InFlightStep]) -> None:
        """The runner has lost what sequence `id_` was to start with, its cached tokens or its grammar: rewind it, and
        drop what `steps` compute for it."""
        seqs = [step.sequences.pop(id_, None) for step in steps]
        if (seq := seqs[0]) is None or not seq.live:
            return
        seq.may_reuse = False
        if seq.request.constraint is None:
            self._rewind(seq)
        else:
            self._preempt([seq], seq.arrived)  # it waits until its grammar is compiled again
