"""The work of running rows in the next step: which join, how far prompts go, which decode.

Everything that a row is planned to do counts as done here, as the next plan may be made before this one is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from .block_budget import BlockBudget
from .inflight_prefix import awaited, follows
from .messages import Sharing
from .outputs import Outputs
from .plan import Admit, DecodeRow, PrefillChunk, StepPlan
from .preemption import DecodeDemand, allocate
from .prefill_budget import PrefillBudget
from .scheduler_counters import SchedulerCounters
from .sequence import Sequence
from .shared_blocks import shared_blocks

MOST_SCORED = 512
"""Prompt tokens of a step whose log-probabilities are wanted, at most: each takes a row of the vocabulary's length."""

Reuse = Callable[[Admit], int]


class SequenceFault(Exception):
    """The runner raised while it looked up the reusable prefix of row `row_id`; `__cause__` is its exception."""

    def __init__(self, row_id: str) -> None:
        super().__init__(f"row {row_id} can't join")
        self.row_id = row_id


def no_reuse(admit: Admit) -> int:
    """What a runner holds of a new row that keeps nothing of the old ones."""
    return 0


class PlanBuilder:
    """`reuse` says what the runner holds of a row that joins. Rows wait for what others compute of their prompts where
    that is at least `worth_waiting` tokens (0: for nothing), which they get as `sharing` says."""

    def __init__(
        self,
        reuse: Reuse,
        pace: PrefillBudget,
        counts: SchedulerCounters,
        outputs: Outputs,
        *,
        worth_waiting: int,
        sharing: Sharing,
    ) -> None:
        self._reuse = reuse
        self._worth_waiting = worth_waiting
        self._sharing = sharing
        self._pace = pace
        self._counts = counts
        self._outputs = outputs

    @property
    def holding(self) -> bool:
        """Whether rows that begin alike hold the same blocks."""
        return self._sharing is Sharing.HELD and self._worth_waiting > 0

    def compose(
        self,
        step: int,
        release: tuple[str, ...],
        running: Collection[Sequence],
        claimed: DecodeDemand,
        room: BlockBudget,
    ) -> StepPlan:
        """Step number `step` of the rows that are `running`, of which those in `claimed` grow first."""
        decoding = allocate(claimed, room)
        active = self._active(running)
        joins: tuple[Admit, ...] = ()
        chunks: tuple[PrefillChunk, ...] = ()
        if len(decoding) < len(active):
            ready = set(claimed.rows)
            joins = tuple(self._joins(active, room))
            waiting = [row for row in active if not row.joined and row.lead is not None]
            active = [row for row in active if row.joined]
            chunks = tuple(self._chunks(active, room, step, waiting))
            newly = (row for row in active if row not in ready and row.decodes_after(step - 1))
            decoding.update(row for row in newly if room.take(row.cached))
        decode = tuple(self._decode(row, step) for row in active if row in decoding)
        return StepPlan(step=step, release=release, admit=joins, prefill=chunks, decode=decode)

    def _active(self, running: Collection[Sequence]) -> list[Sequence]:
        """All that run; in a trial the cleared ones and the first suspect."""
        suspect = next((row for row in running if row.suspect), None)
        if suspect is None:
            return list(running)
        return [row for row in running if row is suspect or (row.joined and not row.suspect)]

    def _joins(self, active: Collection[Sequence], room: BlockBudget) -> Iterable[Admit]:
        """Whoever is new and waits for nobody, while there is room for all that may be reused; it is not known before
        it is taken."""
        joined = [row for row in active if row.joined]
        for row in active:
            if row.joined:
                continue
            held = shared_blocks(row, joined, room.block) if self.holding and room.limited else 0
            if joined and room.blocks(row.known - 1) - held > room.left:
                continue
            if not self._worth_waiting or not follows(row, joined, self._worth_waiting, self._sharing):
                joined.append(row)
                yield self._join(row, room, held)

    def _join(self, row: Sequence, room: BlockBudget, held: int) -> Admit:
        """`row` joins, with what is cached of it, `held` blocks of which others hold. Who wants the log-probabilities
        of its prompt computes all of it."""
        admit = Admit(request=row.request, history=tuple(row.tokens))
        cached = self._reusable(admit) if row.request.prompt_logprobs is None else 0
        if not 0 <= cached < row.known:
            raise AssertionError(f"of {row.known} tokens all but the last may be reused, and {cached} were")
        if not row.reuse_told:
            row.reuse_told = True
            self._outputs.of(row).cached = cached
        row.joined = True
        row.twin = None  # or every row would keep the one before it
        row.cached = row.kept = row.reused = cached
        room.left = max(0, room.left - max(0, room.blocks(cached) - held))
        self._counts.cached_tokens += cached
        return msgspec.structs.replace(admit, cached=cached)

    def _reusable(self, admit: Admit) -> int:
        """What the runner holds of a row. Raises RowFault where it raises."""
        try:
            return self._reuse(admit)
        except Exception as error:
            raise SequenceFault(admit.request.id) from error

    def _chunks(
        self, active: Collection[Sequence], room: BlockBudget, step: int, waiting: Collection[Sequence]
    ) -> Iterable[PrefillChunk]:
        """Shares of the prompts, for parts of which those who are `waiting` wait. Who has no room gets none: its turn
        would come again and again."""
        rows = [row for row in active if row.prefill_left > 0 and room.most(row.cached) > 0]
        if not rows:
            return
        rows.sort(key=lambda row: (row.turn, row.order))
        decoding = sum(row.decodes for row in active)
        shares = self._pace.split([row.prefill_left for row in rows], decoding=decoding, awaiting=len(waiting))
        scored = MOST_SCORED
        for row, share in zip(rows, shares, strict=True):
            if row.request.prompt_logprobs is not None:
                share = min(share, scored)
                scored -= share
            if count := min(share, room.most(row.cached)):
                room.take(row.cached, count)
                yield self._chunk(row, count, step, waiting)

    def _chunk(self, row: Sequence, count: int, step: int, waiting: Collection[Sequence]) -> PrefillChunk:
        marks = awaited(row, waiting) if self._sharing is Sharing.MARKED else ()
        chunk = PrefillChunk(id=row.id, start=row.cached, tokens=row.upcoming(count), awaited=marks)
        row.cached += count
        row.turn = step
        self._counts.prompt_tokens += count
        return chunk

    def _decode(self, row: Sequence, step: int) -> DecodeRow:
        decode = DecodeRow(id=row.id, token=row.last_token, position=row.position)
        row.cached += 1
        row.ahead += 1
        row.decoded = step
        return decode
