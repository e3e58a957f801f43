"""Builder of step plans: which running sequences join, how far prompts are prefilled, which sequences decode.

Planned work counts as done at once, as the next plan may be made before this step is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from .block_budget import BlockBudget
from .capabilities import Sharing
from .chunk_limits import Work
from .encodings import Encodings
from .image import unsplit
from .inflight_prefix import checkpoints, waits_for_prefix
from .outputs import Outputs
from .plan import MAX_SCORED_TOKENS, Admit, DecodeRow, Encode, PrefillChunk, ScoreChunk, StepPlan
from .preemption import DecodeDemand, allocate
from .prefill_budget import PrefillBudget
from .scheduler_counters import SchedulerCounters
from .sequence import Sequence
from .shared_blocks import shared_blocks
from .spec_prefill import SpecPrefill
from .states import State
from .step_times import Charge

MatchPrefix = Callable[[Admit], int]


class SequenceFault(Exception):
    """The runner raised while it looked up a cached prefix for sequence `id`; `__cause__` is its exception."""

    def __init__(self, id_: str) -> None:
        super().__init__(f"sequence {id_} can't join")
        self.id = id_


def no_prefix(admit: Admit) -> int:
    """Return 0: nothing is cached of any sequence."""
    return 0


class PlanBuilder:
    """Builds plans. `match` returns how many tokens of a joining sequence the runner has cached. Sequences wait for
    prefixes of `min_shared` tokens or more that others compute (0: they never wait), shared as `sharing` says. Steps
    with layers of `encodings` and steps with chunks of prompts take turns, where both are wanted. `whole_images`: no
    chunk splits an image."""

    def __init__(
        self,
        match: MatchPrefix,
        prefill_budget: PrefillBudget,
        counters: SchedulerCounters,
        outputs: Outputs,
        spec_prefill: SpecPrefill,
        *,
        min_shared: int,
        sharing: Sharing,
        draft_tokens: int,
        encodings: Encodings,
        whole_images: bool,
    ) -> None:
        self._match = match
        self._min_shared = min_shared
        self._sharing = sharing
        self._draft_tokens = draft_tokens
        self._encodings = encodings
        self._whole_images = whole_images
        self._encoded_last = False
        self._prefill_budget = prefill_budget
        self._counters = counters
        self._outputs = outputs
        self._spec_prefill = spec_prefill

    @property
    def shares_blocks(self) -> bool:
        """Whether sequences with a common prefix hold the same blocks."""
        return self._sharing.holds and self._min_shared > 0

    def build(
        self,
        step: int,
        running: Collection[Sequence],
        demand: DecodeDemand,
        budget: BlockBudget,
        drafts: Mapping[Sequence, int] | None = None,
    ) -> tuple[StepPlan, Charge]:
        """Plan step number `step` of the `running` sequences. Those in `demand` get their blocks first. `drafts` are
        the numbers of draft tokens of some; with None all have as many as they may.

        Return the plan, and its charge to the prefill budget.
        """
        decoding = allocate(demand, budget)
        active = self._active(running)
        joins: tuple[Admit, ...] = ()
        encodes: tuple[Encode, ...] = ()
        chunks: list[PrefillChunk] = []
        on_credit, work, units = 1.0, Work.PROMPTS, 0
        scores: tuple[ScoreChunk, ...] = ()
        if len(decoding) < len(active):
            demanded = set(demand.sequences)
            joins = tuple(self._joins(active, budget))
            waiting = [seq for seq in active if not seq.joined and seq.prefix_leader is not None]
            active = [seq for seq in active if seq.joined]
            prompts, candidates = self._prompts(active, budget), self._spec_prefill.candidates(active)
            encodes, units = self._encodes(active, may_wait=bool(prompts or candidates))
            if encodes:
                work = Work.IMAGES
            elif candidates and not any(_turn(seq) < _turn(candidates[0]) for seq in prompts):
                work, scores = self._scoring(candidates, active, step)
            else:
                chunks, on_credit = self._chunks(prompts, active, budget, step, waiting)
            self._encoded_last = bool(encodes) or (self._encoded_last and not (scores or chunks))
            newly = (seq for seq in active if seq not in demanded and seq.decodes_after(step - 1))
            decoding.update(seq for seq in newly if budget.allocate(seq.num_computed_tokens))
        decode = tuple(self._decode(seq, step, budget, drafts) for seq in active if seq in decoding)
        plan = StepPlan(step=step, admit=joins, prefill=tuple(chunks), decode=decode, score=scores, encode=encodes)
        return plan, self._charge(plan, on_credit, active, work, units)

    def _active(self, running: Collection[Sequence]) -> list[Sequence]:
        """Return all running sequences; with suspects among them, the first suspect and those that are none."""
        suspect = next((seq for seq in running if seq.suspect), None)
        if suspect is None:
            return list(running)
        return [seq for seq in running if seq is suspect or (seq.joined and not seq.suspect)]

    def _joins(self, active: Collection[Sequence], budget: BlockBudget) -> Iterable[Admit]:
        """Let new sequences join that wait for no leader, while there are blocks for their whole prompts. Of those with
        images one joins a step where others decode: that takes the host milliseconds each, and one tower all of them
        wait for."""
        joined = [seq for seq in active if seq.joined]
        decoding, images_wait = any(seq.decodes for seq in joined), False
        for seq in active:
            if seq.joined or (images_wait and seq.request.images):
                continue
            shared = shared_blocks(seq, joined, budget.block_size) if self.shares_blocks and budget.limited else 0
            if joined and budget.blocks(seq.prefill_tokens) - shared > budget.free:
                continue
            if not self._min_shared or not waits_for_prefix(seq, joined, self._min_shared, self._sharing):
                joined.append(seq)
                images_wait = images_wait or (decoding and bool(seq.request.images))
                yield self._join(seq, budget, shared)

    def _join(self, seq: Sequence, budget: BlockBudget, shared: int) -> Admit:
        """Let `seq` join with its cached prefix, of which running sequences hold `shared` blocks. One that computes its
        whole prompt may not reuse any."""
        reusable = -1 if seq.sparse is None else seq.sparse.lead
        admit = Admit(request=seq.request, history=tuple(seq.tokens), reusable=reusable)
        cached = self._cached(admit) if seq.may_reuse else 0
        self._spec_prefill.joins(seq, cached)
        if not 0 <= cached < seq.num_tokens:
            raise AssertionError(f"of {seq.num_tokens} tokens all but the last may be reused, and {cached} were")
        if not seq.cached_reported:
            seq.cached_reported = True
            self._outputs.of(seq).cached_tokens = cached
        seq.joined = True
        seq.prefix_peer = None  # else each sequence would keep the one before it alive
        seq.num_computed_tokens = seq.committed_tokens = seq.cached_tokens = cached
        budget.free = max(0, budget.free - max(0, budget.blocks(cached) - shared))
        self._counters.cached_tokens += cached
        self._encodings.join(seq)
        skipped = 0 if seq.sparse is None else seq.sparse.skipped
        return msgspec.structs.replace(admit, cached_tokens=cached, skipped=skipped)

    def _cached(self, admit: Admit) -> int:
        """Return how many tokens the runner has cached. Raises SequenceFault if it raises."""
        try:
            return self._match(admit)
        except Exception as error:
            raise SequenceFault(admit.request.id) from error

    def _prompts(self, active: Collection[Sequence], budget: BlockBudget) -> list[Sequence]:
        """Return the sequences that have something to prefill, in turn order. One without free blocks for a token, or
        for the image that comes next, gets nothing, or its turn would come again and again."""
        return sorted((seq for seq in active if not seq.scores and self._has_room(seq, budget)), key=_turn)

    def _has_room(self, seq: Sequence, budget: BlockBudget) -> bool:
        least = seq.least_chunk if self._whole_images else 1
        return seq.prefill_ready > 0 and budget.capacity(seq.num_computed_tokens) >= least

    def _encodes(self, active: Collection[Sequence], *, may_wait: bool) -> tuple[tuple[Encode, ...], int]:
        """Plan layers of images, and return their units, unless it is the turn of prompts that `may_wait` for them."""
        waiting = sum(bool(seq.awaited_images) for seq in active)
        if not waiting or (self._encoded_last and may_wait):
            return (), 0
        decoding = sum(seq.decodes for seq in active)
        units = self._prefill_budget.budget(prefilling=waiting, decoding=decoding, work=Work.IMAGES)
        return self._encodings.plan(active, units, decoding=decoding > 0) if units else ((), 0)

    def _scoring(
        self, candidates: list[Sequence], active: Collection[Sequence], step: int
    ) -> tuple[Work, tuple[ScoreChunk, ...]]:
        """Plan what the step scores, and of which kind of work that is. Raises SequenceFault."""
        decoding = sum(seq.decodes for seq in active)
        try:
            return self._spec_prefill.plan(candidates, self._prefill_budget, decoding=decoding, step=step)
        except Exception as error:
            raise SequenceFault(candidates[0].id) from error

    def _chunks(
        self,
        seqs: Collection[Sequence],
        active: Collection[Sequence],
        budget: BlockBudget,
        step: int,
        waiting: Collection[Sequence],
    ) -> tuple[list[PrefillChunk], float]:
        """Split the prefill budget among the prompts of `seqs`; `waiting` sequences wait for parts of them. Return the
        chunks and their part that is on credit."""
        if not seqs:
            return [], 1.0
        shares = self._prefill_budget.split(
            [seq.prefill_ready for seq in seqs],
            decoding=sum(seq.decodes for seq in active),
            awaiting=len(waiting),
            forced=_on_credit(seqs, active),
            computed=[seq.prefilled_tokens for seq in seqs],
        )
        chunks, scores_left, left = [], MAX_SCORED_TOKENS, self._prefill_budget.max_tokens
        for seq, share in zip(seqs, shares.tokens, strict=True):
            if seq.request.prompt_logprobs is not None:
                share = min(share, scores_left)
                scores_left -= share
            if count := self._unsplit(seq, min(share, budget.capacity(seq.num_computed_tokens)), budget, left):
                budget.allocate(seq.num_computed_tokens, count)
                chunks.append(self._chunk(seq, count, step, waiting))
                left -= count
        return chunks, shares.on_credit

    def _unsplit(self, seq: Sequence, count: int, budget: BlockBudget, left: int) -> int:
        """Return how many tokens to compute in place of `count`, so that no image is split; at most `left`."""
        if not (self._whole_images and seq.request.images and count):
            return count
        most = min(left, budget.capacity(seq.num_computed_tokens), seq.prefill_ready)
        return unsplit(seq.request.images, seq.num_computed_tokens, min(count, most), most)

    def _chunk(self, seq: Sequence, count: int, step: int, waiting: Collection[Sequence]) -> PrefillChunk:
        marks = checkpoints(seq, waiting) if self._sharing.marks else ()
        start = seq.num_computed_tokens
        positions = () if seq.sparse is None else seq.sparse.positions(start, count)
        chunk = PrefillChunk(id=seq.id, start=start, count=count, checkpoints=marks, positions=positions)
        seq.num_computed_tokens += count
        seq.last_prefill_step = step
        if seq.state is State.PREFILL:  # else its tokens are forced ones
            self._counters.prompt_tokens += count
        return chunk

    def _charge(self, plan: StepPlan, on_credit: float, active: Iterable[Sequence], work: Work, units: int) -> Charge:
        if work is not Work.PROMPTS:
            units += sum(chunk.count for chunk in plan.score)
            return self._prefill_budget.charge(units, decoding=len(plan.decode), work=work)
        tokens = {chunk.id: chunk.count for chunk in plan.prefill}
        if not tokens:
            return self._prefill_budget.charge(0, decoding=len(plan.decode), on_credit=on_credit)
        decoding = sum(decode.id not in tokens for decode in plan.decode)
        forced = sum(tokens.get(seq.id, 0) for seq in active if seq.state is State.DECODE)
        return self._prefill_budget.charge(sum(tokens.values()), decoding=decoding, on_credit=on_credit, forced=forced)

    def _decode(
        self, seq: Sequence, step: int, budget: BlockBudget, drafts: Mapping[Sequence, int] | None
    ) -> DecodeRow:
        most = self._draft_tokens if drafts is None else drafts.get(seq, 0)
        count = self._drafts(seq, most, budget) if most else 0
        decode = DecodeRow(id=seq.id, position=seq.position, drafts=count)
        seq.plan_decode(step, count)
        return decode

    def _drafts(self, seq: Sequence, most: int, budget: BlockBudget) -> int:
        """Allocate blocks for at most `most` draft tokens from what all others have left; return their number."""
        held = seq.num_computed_tokens + 1
        drafts = min(most, seq.draftable_tokens, budget.capacity(held))
        budget.allocate(held, drafts)
        return drafts


def _turn(seq: Sequence) -> tuple[int, int]:
    """The order in which sequences get their chunks: those that were served longest ago first."""
    return seq.last_prefill_step, seq.order


def _on_credit(seqs: Iterable[Sequence], active: Iterable[Sequence]) -> Collection[int]:
    """Return the places of those of `seqs` whose chunks are paid from the credit even where they end: pooled ones,
    those whose forced tokens delay sequences that will have none, and those with images to come, for whose layers their
    first tokens waited anyway."""
    paid = [i for i, seq in enumerate(seqs) if seq.state is State.DECODE or not seq.fed_tokens or seq.computes_images]
    return paid if paid and any(seq.decodes and seq.request.constraint is None for seq in active) else ()
