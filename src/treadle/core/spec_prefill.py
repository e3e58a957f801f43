"""SpecPrefill in a scheduler: which prompts are prefilled in part, and the plans that score them.

A prompt is scored once it has joined, before any of it is prefilled. A step either prefills or scores: the kind whose
prompts have waited longer. Prompts that are scored share a step like those that are prefilled, and pay from the same
credit, so that decoding sequences wait no longer for them. The scorer's cache goes to the first ones, and others wait.

A prompt that several sequences have, as the choices of a request, is scored for the first of them, and the others wait
for what is kept: where the same part of it is cached, that is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from .capabilities import SpecPrefillCapabilities
from .chunk_limits import ChunkLimits, Work
from .messages import Submit
from .outputs import Outputs
from .plan import RowKept, ScoreChunk
from .prefill_budget import PrefillBudget
from .sequence import Sequence
from .sparse_prompt import LOOK_AHEAD, LOOK_AHEAD_UNITS, SparsePrompt
from .statistics import SpecPrefillStatistics

MatchScored = Callable[[Submit], int]


def not_scored(request: Submit) -> int:
    """Return 0: the scorer has cached nothing of any prompt."""
    return 0


class SpecPrefill:
    """The prompts of a scheduler that are prefilled in part, as a runner with `can` does it. `match` returns how many
    tokens of a prompt its scorer has cached."""

    def __init__(self, can: SpecPrefillCapabilities, outputs: Outputs, match: MatchScored = not_scored) -> None:
        self._can = can
        self._outputs = outputs
        self._match = match
        self._prompts = self._scored = self._kept = self._failed = 0
        self._reason = ""
        self.scoring_s = 0.0

    def limits(self, prefill_tokens: int) -> dict[Work, ChunkLimits]:
        """Return the sizes of the scorer's chunks, where steps compute up to `prefill_tokens` tokens of prompts."""
        can = self._can
        most = can.prefill_tokens or prefill_tokens
        return {
            Work.SCORING: ChunkLimits.of(most, can.prefill_quantum, can.chunk_sizes),
            Work.LOOK_AHEAD: ChunkLimits(LOOK_AHEAD_UNITS * can.rows, quantum=1),
        }

    # Which prompts -----------------------------------------------------------------------------------------------

    def arrived(self, seq: Sequence) -> None:
        """Leave out a part of a sequence's prompt, if it is long enough: as if none of it was cached."""
        if self._takes(seq.request):
            self._begin(seq, 0)

    def joins(self, seq: Sequence, cached: int) -> None:
        """Settle, as a sequence joins with its first `cached` tokens, what is scored, unless it is known what is
        kept."""
        if seq.scores:
            self._begin(seq, cached)
            out = self._outputs.of(seq)
            out.scored_tokens = 0 if seq.sparse is None else seq.sparse.scored
            out.kept_tokens = 0 if seq.sparse is None else seq.sparse.kept

    def _takes(self, request: Submit) -> bool:
        """Whether a prompt may be prefilled in part: none whose tokens all have results, or are to be cached, and none
        with images, which the scorer does not see."""
        return (
            bool(self._can.scorer)
            and request.sparse_prefill is not False
            and len(request.prompt) <= self._can.longest
            and request.max_tokens > 0
            and not (request.computes_whole_prompt or request.images)
        )

    def _begin(self, seq: Sequence, cached: int) -> None:
        """Leave out a part of the prompt behind its `cached` tokens, unless too few are left of it."""
        length = len(seq.request.prompt)
        enough = length - cached >= max(2, self._can.min_tokens)
        if not enough:
            seq.leave_out(None)
            return
        seq.leave_out(SparsePrompt.of(length, cached, self._can.keep))
        assert seq.sparse is not None
        seq.sparse.prompt = hash((seq.request.salt, cached, seq.request.prompt))

    # Plans -------------------------------------------------------------------------------------------------------

    def candidates(self, active: Collection[Sequence]) -> list[Sequence]:
        """Return the sequences whose prompts can be scored in the next step, in turn order: as many as the scorer has
        places and memory for."""
        waiting = _of_different_prompts(seq for seq in active if seq.scores and seq.joined)
        if not waiting:
            return waiting
        begun = [seq for seq in waiting if seq.sparse is not None and seq.sparse.begun]
        rows, free = self._can.rows - len(begun), self._can.blocks - sum(map(self._blocks, begun))
        for seq in sorted(waiting, key=lambda seq: seq.order):
            if seq not in begun and rows > 0 and (not self._can.blocks or self._blocks(seq) <= free):
                rows, free = rows - 1, free - self._blocks(seq)
                begun.append(seq)
        begun = [seq for seq in begun if _units_left(seq)]
        return sorted(begun, key=lambda seq: (seq.last_prefill_step, seq.order))

    def _blocks(self, seq: Sequence) -> int:
        """Return the blocks of the scorer's cache that a sequence holds in the end."""
        return -(-(len(seq.request.prompt) + LOOK_AHEAD) // self._can.block)

    def plan(
        self, candidates: list[Sequence], budget: PrefillBudget, *, decoding: int, step: int
    ) -> tuple[Work, tuple[ScoreChunk, ...]]:
        """Plan the scoring of step number `step`, beside `decoding` sequences, of one kind of work. Raises what the
        runner raises when it is asked for cached tokens."""
        work = _kind(candidates[0])
        seqs = [seq for seq in candidates if _kind(seq) is work]
        for seq in seqs:
            assert seq.sparse is not None
            if not seq.sparse.begun:
                seq.sparse.begun, seq.sparse.units = True, self._match(seq.request) if seq.may_reuse else 0
        shares = budget.split_scoring(work, [_units_left(seq) for seq in seqs], decoding=decoding)
        return work, tuple(_chunk(seq, count, step) for seq, count in zip(seqs, shares, strict=True) if count)

    # Results -----------------------------------------------------------------------------------------------------

    def settle(self, seq: Sequence, kept: RowKept, running: Collection[Sequence]) -> None:
        """Settle what is kept of a sequence's prompt, and of those of others that are `running` and have the same; all
        of it where it could not be scored."""
        sparse = seq.sparse
        if sparse is None or not seq.scores:
            raise AssertionError("a prompt is scored once")
        if kept.failure:
            self._failed, self._reason = self._failed + 1, kept.failure
            seq.leave_out(None)
            out = self._outputs.of(seq)
            out.scored_tokens = out.kept_tokens = 0
            return
        sparse.choose(kept.positions)
        self._prompts += 1
        self._scored += sparse.scored
        self._kept += sparse.kept - sparse.start
        for other in running:
            if _awaits(other, seq):
                assert other.sparse is not None
                other.sparse.choose(kept.positions)

    def statistics(self, running: Collection[Sequence]) -> SpecPrefillStatistics:
        """Return a snapshot."""
        return SpecPrefillStatistics(
            prompts=self._prompts,
            scored_tokens=self._scored,
            kept_tokens=self._kept,
            failed=self._failed,
            reason=self._reason,
            scoring_s=self.scoring_s,
            scoring=sum(seq.scores for seq in running),
        )


def _of_different_prompts(seqs: Iterable[Sequence]) -> list[Sequence]:
    """Return one sequence for each prompt: that whose scoring has begun, or the first."""
    found: dict[int, Sequence] = {}
    for seq in sorted(seqs, key=lambda seq: seq.order):
        assert seq.sparse is not None
        known = found.get(seq.sparse.prompt)
        if known is None or (seq.sparse.begun and known.sparse is not None and not known.sparse.begun):
            found[seq.sparse.prompt] = seq
    return list(found.values())


def _awaits(other: Sequence, seq: Sequence) -> bool:
    """Whether another sequence waits for what is kept of the prompt of `seq`, as it has the same."""
    mine, own = other.sparse, seq.sparse
    if mine is None or own is None or not (other.scores and other.joined) or mine.begun:
        return False
    same = mine.prompt == own.prompt and mine.start == own.start and other.request.salt == seq.request.salt
    return same and other.request.prompt == seq.request.prompt


def _kind(seq: Sequence) -> Work:
    return Work.SCORING if seq.sparse is not None and seq.sparse.tokens_left else Work.LOOK_AHEAD


def _units_left(seq: Sequence) -> int:
    """Return the units of the kind that is next."""
    assert seq.sparse is not None
    return seq.sparse.tokens_left or seq.sparse.units_left


def _chunk(seq: Sequence, count: int, step: int) -> ScoreChunk:
    assert seq.sparse is not None
    chunk = ScoreChunk(seq.id, seq.sparse.units, count)
    seq.sparse.units += count
    seq.last_prefill_step = step
    return chunk
