"""Accounting of finished steps: what sequences have gained, and the time that it took."""

from __future__ import annotations

from .chunk_limits import Work
from .encodings import Encodings
from .inflight_step import InFlightStep
from .integrity import check
from .messages import Finish, FinishReason
from .outputs import Outputs
from .plan import RowScores, RowTokens, StepResult
from .prefill_budget import PrefillBudget
from .scheduler_counters import SchedulerCounters
from .sequence import Sequence
from .spec_prefill import SpecPrefill
from .speculation import Speculation
from .states import Event, State
from .step_times import Charge


class StepAccounting:
    """Enters tokens of live sequences into `outputs` and `counters`, and times of steps into the budgets. It ends no
    sequence: it returns the finish of one that has come to its end."""

    def __init__(
        self,
        outputs: Outputs,
        counters: SchedulerCounters,
        prefill_budget: PrefillBudget,
        spec_prefill: SpecPrefill,
        speculation: Speculation,
        encodings: Encodings,
    ) -> None:
        self._outputs = outputs
        self._counters = counters
        self._prefill_budget = prefill_budget
        self._spec_prefill = spec_prefill
        self._speculation = speculation
        self._encodings = encodings

    def times(self, step: InFlightStep, result: StepResult, following: Charge | None) -> None:
        """Account for the seconds of `step`. `following` is the charge of the next one, if that is in flight."""
        prefill_s, decode_s = self._prefill_budget.observe(
            step.charge,
            prefill_s=result.prefill_s,
            decode_s=result.decode_s,
            mixed_s=result.mixed_s,
            following=following,
        )
        match step.charge.work:
            case Work.PROMPTS:
                self._counters.prefill_s += prefill_s
            case Work.IMAGES:
                self._encodings.encode_s += prefill_s
            case _:
                self._spec_prefill.scoring_s += prefill_s
        self._counters.decode_s += decode_s
        self._speculation.looked(step.plan, result.proposing_s)

    def scored(self, seq: Sequence, scores: RowScores) -> None:
        """Account for log-probabilities of a prompt's tokens."""
        self._outputs.of(seq).prompt_logprobs += seq.unreported_scores(scores.logprobs)

    def prefilled(self, seq: Sequence, count: int) -> Finish | None:
        """Settle that the first `count` tokens of `seq` are computed."""
        seq.committed_tokens = count
        if seq.state is State.PREFILL:
            reached = count if seq.sparse is None else seq.sparse.reached(count)
            self._outputs.of(seq).prompt_done = min(reached, len(seq.request.prompt))
        if seq.request.max_tokens or count != seq.prefill_tokens:
            return None
        check(seq.request.pooling is None, "a sequence that is pooled gains its vector with its last chunk")
        return Finish(reason=FinishReason.LENGTH)

    def decoded(self, seq: Sequence, drafts: int, gained: RowTokens) -> Finish | None:
        """Settle the tokens that `seq` has gained by a decode row with at most so many `drafts`."""
        match = seq.match
        count, finish = seq.settle_decode(drafts, gained)
        if count == 0:
            return None
        out = self._outputs.of(seq)
        if gained.drafted:
            sampled = len(gained.tokens) - gained.forced
            accepted = count if count < sampled or gained.ends_drafted else sampled - 1
            ended, gain = finish is not None, min(count, sampled) - 1
            self._speculation.verified(seq, match, gained.drafted, accepted, gain=gain, ended=ended)
            out.drafted += gained.drafted
            out.accepted += accepted
        elif drafts:
            self._speculation.missed(seq, match)
        if seq.state is State.PREFILL:
            seq.on(Event.PROMPT_DONE)
            self._counters.prompt_tokens += 1  # the last one was fed as a decode row
            out.prompt_done = len(seq.request.prompt)
        self._counters.completion_tokens += count
        self._counters.forced_tokens += max(0, count + gained.forced - len(gained.tokens))
        out.tokens += gained.tokens[:count]
        out.logprobs += gained.logprobs[:count]
        return finish
