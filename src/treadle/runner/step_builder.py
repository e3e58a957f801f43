"""Steps out of plans: which rows compute what, and which of them can't."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from ..core.plan import DecodeRow, PrefillChunk, StepPlan
from .admission import Admission
from .forward.segments import RowSegment
from .kv.backend import KvBackend
from .step import RunningRow, Step, segment_of
from .step_images import encode_images
from .verification import Speculation
from .vision.encoder import ImageEncoder, Stale


class StepBuilder:
    """Builds the steps of plans for the live sequences `rows`, whose caches are in `backend`. A sequence that is
    admitted again under its id is `forget`-ed first. `least_forced` returns the least number of forced tokens that are
    taken at once, for a number of decoding sequences (0: none)."""

    def __init__(
        self,
        rows: dict[str, RunningRow],
        backend: KvBackend,
        admission: Admission,
        speculation: Speculation,
        images: ImageEncoder,
        *,
        forget: Callable[[str], None],
        least_forced: Callable[[int], int],
    ) -> None:
        self._rows = rows
        self._backend = backend
        self._admission = admission
        self._speculation = speculation
        self._images = images
        self._forget = forget
        self._least_forced = least_forced

    def build(self, plan: StepPlan, began: float, before: Step | None) -> Step:
        """Admit the plan's new sequences, propose drafts, begin to encode images, and return the step with the segment
        of each row. `before` is the step in flight, whose tokens are not known yet."""
        step = Step(began=began, segments=[], rows={}, decodes=[], failed={}, propose=plan.propose)
        step.observed = self._speculation.observes(plan)
        if plan.admit:
            for admit in plan.admit:
                self._forget(admit.request.id)
            self._admission.admit(plan.admit, step)
        if plan.verifies:
            assert before is None, "drafts are verified in lock-step"
            step.drafts = self._speculation.draft(self._rows, plan.decode, self._least_forced(len(plan.decode)))
        if plan.encode:
            for row in encode_images(step, plan.encode, self._rows, self._images):
                self._evict(step, row)
        failed, evicted = step.failed, step.evicted
        sampled = {decode.id: i for i, decode in enumerate(before.decodes)} if before is not None else {}
        decoding = {decode.id: decode for decode in plan.decode}
        for chunk in plan.prefill:
            decode = decoding.pop(chunk.id, None)
            if chunk.id not in failed and chunk.id not in evicted:
                self._add_row(step, chunk.id, chunk, decode, sampled)
        for id_, decode in decoding.items():
            if id_ not in failed and id_ not in evicted:
                self._add_row(step, id_, None, decode, sampled)
        step.decodes = [decode for decode in plan.decode if decode.id in step.rows]
        return step

    def _add_row(
        self, step: Step, id_: str, chunk: PrefillChunk | None, decode: DecodeRow | None, sampled: Mapping[str, int]
    ) -> None:
        """Add the segment that a row computes to the step, or the reason why it can't. `sampled` are the places of the
        rows whose last token the step before samples."""
        row = self._rows.get(id_)
        if row is None:
            step.failed[id_] = "the runner holds no cache for this request"
            return
        segment = segment_of(row, chunk, decode, sampled)
        if chunk is not None:
            segment = self._chunk(step, row, chunk, segment)
        if row.again or step.drafts:
            segment = self._speculation.extended(segment, row, step.drafts.get(id_))
        try:
            segment = self._images.columns(row.images, segment)
        except Stale:
            self._evict(step, row)
            return
        except ValueError as error:
            step.failed[id_] = str(error)
            return
        if step.observed and row.request.speculate and row.pool is None:
            segment = replace(segment, hidden=len(segment.tokens), observed=True)
        row.cached = segment.end
        step.segments.append(segment)
        step.rows[id_] = row
        if chunk is not None and row.pool is not None:
            step.pooled.append(segment)

    def _chunk(self, step: Step, row: RunningRow, chunk: PrefillChunk, segment: RowSegment) -> RowSegment:
        """Return the segment of a chunk, with the hidden states that its row needs."""
        if chunk.checkpoints:
            self._backend.checkpoint(row, chunk.checkpoints)
        if row.pool is None:
            return segment
        return replace(segment, hidden=row.pool.needed(segment.start, segment.end))

    def _evict(self, step: Step, row: RunningRow) -> None:
        """Forget a row that lacks what was computed of an image, so that it is admitted again."""
        step.evicted.add(row.id)
        step.rows.pop(row.id, None)
        del self._rows[row.id]
        self._images.release(row.images)
        self._backend.invalidate([row])
