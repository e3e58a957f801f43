"""The text runner: rows of tokens through one model, as a plan says.

Rules: the plan decides which rows prefill how far and which decode; all rows that decode share one forward pass (or
run one by one where the model's caches can't be merged). Everything a step computes is evaluated within it, caches
included, so no graph outlives a step. After an exception the rows of the plan are lost until they are released and
admitted again; the others are as they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..core.messages import Capabilities, RunnerStatistics, Sampling, Submit
from ..core.plan import Admit, DecodeRow, PrefillChunk, RowFailure, RowTokens, StepPlan, StepResult
from . import memory, mlxlm
from .base import Job, JobContext
from .batch import DecodeBatch, own_bytes
from .guard import OwnerThread, leave_thread, mlx_runtime
from .logprobs import Logprobs
from .mlxlm import Caches
from .model import LoadedModel
from .prefill import passes, together
from .sampling import SamplingRow, draw

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    request: Submit
    sampling: SamplingRow
    cached: int = 0


class TextRunner:
    """Computes steps for `model`. The thread that builds it owns it: any other that calls it gets WrongThread."""

    def __init__(
        self,
        model: LoadedModel,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._owner = OwnerThread()
        self._model = model
        self._clock = clock
        self._before_step = before_step
        self._rows: dict[str, _Row] = {}
        self._own: dict[str, Caches] = {}  # caches of rows that are not in the batch
        self._batch = DecodeBatch()
        self._result = StepResult()
        if not model.batched:
            _log.warning("%s decodes its requests one by one: %s", model.name, model.details.get("not batched"))

    def capabilities(self) -> Capabilities:
        """What this runner can do."""
        self._owner.check()
        model = self._model
        return Capabilities(
            model=model.name,
            architecture=model.architecture,
            vocabulary=model.vocabulary,
            context=model.context,
            device=model.device,
            dtype=model.dtype,
            parameters=model.parameters,
            weight_bytes=model.weight_bytes,
            kv_token_bytes=model.kv.token_bytes,
            kv_row_bytes=model.kv.row_bytes,
            kv_budget_bytes=model.kv_budget_bytes,
            prefill_quantum=model.prefill_quantum,
            path="batched" if model.batched else "serialized",
            details=model.details,
        )

    def warm_up(self) -> None:
        """Prefill and decode two rows, one greedy and one with every stage of sampling; leaves nothing behind (C2).
        Where passes have usual lengths, those are tried too, so that the first prompt does not wait for their plans."""
        self._owner.check()
        self._warm_passes()
        requests = [Submit(id=f"warm-up {i}", prompt=(0, 1, 0), max_tokens=2) for i in range(2)]
        sampling = Sampling(temperature=1.0, top_p=0.9, top_k=8, repetition_penalty=1.1)
        requests[1] = Submit(id="warm-up 1", prompt=(0, 1, 0), max_tokens=2, sampling=sampling, logprobs=1)
        ids = [request.id for request in requests]
        try:
            chunks = tuple(PrefillChunk(id=id_, start=0, tokens=(0, 1)) for id_ in ids)
            decode = tuple(DecodeRow(id=id_, token=0, position=0) for id_ in ids)
            admit = tuple(Admit(request=request) for request in requests)
            result = self.execute(StepPlan(step=0, admit=admit, prefill=chunks, decode=decode))
            if result.failures:
                raise ValueError(result.failures[0].message)
        finally:
            for id_ in ids:
                self.release(id_)

    def _warm_passes(self) -> None:
        quantum = self._model.prefill_quantum
        sizes = (quantum, quantum, self._model.pad_to)
        if not quantum or sum(sizes) >= self._model.context:
            return
        request = Submit(id="warm-up", prompt=(0,) * (sum(sizes) + 1), max_tokens=2)
        try:
            start = 0
            for size in sizes:
                chunk = PrefillChunk(id=request.id, start=start, tokens=request.prompt[start : start + size])
                self.execute(StepPlan(step=0, admit=() if start else (Admit(request=request),), prefill=(chunk,)))
                start += size
        finally:
            self.release(request.id)

    def room(self) -> int:
        """Nothing limits rows here but what the scheduler reserves."""
        return 0

    def reuse(self, admit: Admit) -> int:
        """Nothing is kept of rows that have gone."""
        return 0

    def start(self, plan: StepPlan) -> None:
        """Do the plan's work."""
        self._result = self.execute(plan)

    def finish(self) -> StepResult:
        """What the last step did."""
        return self._result

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the plan's work: admissions, prefill one row at a time, one decode step of all its decode rows.

        Raises RunnerBroken when MLX's runtime failed. Any other exception leaves the plan's rows lost.
        """
        self._owner.check()
        self._before_step()
        failed: dict[str, str] = {}
        began = self._clock()
        for admit in plan.admit:
            self._admit(admit, failed)
        self._prefill_all(plan.prefill, failed)
        middle = self._clock()
        rows = self._decode(plan.decode, failed)
        ended = self._clock()
        return StepResult(
            rows=rows,
            failures=tuple(RowFailure(id=id_, message=message) for id_, message in failed.items()),
            prefill_s=middle - began if plan.prefill else 0.0,
            decode_s=ended - middle if plan.decode else 0.0,
        )

    def release(self, row_id: str) -> None:
        """Forget a row. Its memory is free at once, or at the next decode step if others share its batch."""
        self._owner.check()
        if self._rows.pop(row_id, None) is None:
            return
        self._own.pop(row_id, None)
        if not any(id_ in self._rows for id_ in self._batch.ids):
            self._batch.drop()
        if not self._rows:
            memory.give_back()

    def statistics(self) -> RunnerStatistics:
        """Memory in use."""
        self._owner.check()
        return RunnerStatistics(**memory.statistics_of(self._batch.kv_bytes + own_bytes(self._own)))

    def jobs(self) -> Mapping[str, Job]:
        """`memory` answers with bytes by kind; `release_memory` gives freed buffers back and says how many bytes."""
        return {"memory": self._memory_job, "release_memory": self._release_memory_job}

    def close(self) -> None:
        """Free rows, caches and weights, and end MLX on this thread unless it is the main one."""
        self._owner.check()
        self._rows.clear()
        self._own.clear()
        self._batch.drop()
        del self._model
        memory.give_back()
        leave_thread()

    # Inside ---------------------------------------------------------------------------------------------------------

    def _memory_job(self, context: JobContext, args: Mapping[str, Any]) -> dict[str, int]:
        self._owner.check()
        return memory.statistics_of(self._batch.kv_bytes + own_bytes(self._own))

    def _release_memory_job(self, context: JobContext, args: Mapping[str, Any]) -> dict[str, int]:
        self._owner.check()
        return {"released_bytes": memory.give_back()}

    def _admit(self, admit: Admit, failed: dict[str, str]) -> None:
        request = admit.request
        self.release(request.id)
        try:
            self._check_tokens((*request.prompt, *admit.history))
            sampling = SamplingRow(request, admit.history, self._model.vocabulary)
        except (ValueError, TypeError, OverflowError) as error:
            failed[request.id] = str(error)
            return
        self._rows[request.id] = _Row(request, sampling)
        self._own[request.id] = self._model.new_caches()

    def _check_tokens(self, tokens: tuple[int, ...]) -> None:
        """Out of range ids are read from outside the embedding table on some devices."""
        if not tokens:
            raise ValueError("the prompt is empty")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._model.vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is outside the model's vocabulary of {self._model.vocabulary}")

    def _prefill_all(self, chunks: Sequence[PrefillChunk], failed: dict[str, str]) -> None:
        """Several short chunks in one pass where the model can, the others one by one."""
        for group in passes(chunks) if self._model.shares_prefill else [[chunk] for chunk in chunks]:
            if len(group) == 1 or not self._prefill_together(group):
                for chunk in group:
                    self._prefill(chunk, failed)

    def _prefill_together(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Compute `chunks` in one pass. False, with nothing changed, where one of them has to be looked at alone."""
        if any(chunk.id not in self._own for chunk in chunks):
            return False
        try:
            for chunk in chunks:
                self._check_tokens(chunk.tokens)
            with mlx_runtime("reading prompts"):
                caches = together(
                    self._model.module,
                    [chunk.tokens for chunk in chunks],
                    [self._own[chunk.id] for chunk in chunks],
                    pad_to=self._model.pad_to,
                )
        except (ValueError, TypeError, IndexError, OverflowError):
            return False
        for chunk, own in zip(chunks, caches, strict=True):
            self._own[chunk.id] = own
            self._rows[chunk.id].cached += len(chunk.tokens)
        return True

    def _prefill(self, chunk: PrefillChunk, failed: dict[str, str]) -> None:
        if chunk.id in failed:
            return
        row, caches = self._rows.get(chunk.id), self._own.get(chunk.id)
        if row is None or caches is None:
            self._fail(chunk.id, "the runner holds no cache to prefill for this request", failed)
            return
        assert chunk.start == row.cached, f"chunk starts at {chunk.start}, the cache holds {row.cached}"
        try:
            self._check_tokens(chunk.tokens)
            with mlx_runtime("reading a prompt"):
                self._model.prefill(chunk.tokens, caches)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            self._fail(chunk.id, f"the prompt can't be read: {error}", failed)
            return
        row.cached += len(chunk.tokens)

    def _fail(self, row_id: str, message: str, failed: dict[str, str]) -> None:
        self.release(row_id)
        failed[row_id] = message

    def _decode(self, plan: Sequence[DecodeRow], failed: dict[str, str]) -> tuple[RowTokens, ...]:
        wanted = {}
        for decode in plan:
            if decode.id in failed:
                continue
            if decode.id in self._own or (decode.id in self._rows and decode.id in self._batch.ids):
                wanted[decode.id] = decode
            else:
                self._fail(decode.id, "the runner holds no cache to decode this request from", failed)
        if not wanted:
            return ()
        try:
            with mlx_runtime("decoding"):
                gained = self._step(wanted)
        except BaseException:
            self._lose(wanted)
            raise
        return tuple(gained[id_] for id_ in wanted)

    def _lose(self, ids: Mapping[str, DecodeRow]) -> None:
        """The caches of these rows may have advanced in some layers only."""
        self._batch.drop()
        for id_ in ids:
            self._own.pop(id_, None)

    def _step(self, wanted: Mapping[str, DecodeRow]) -> dict[str, RowTokens]:
        """One token for each row."""
        logits, ids, caches = self._forward(wanted)
        rows = [self._rows[id_] for id_ in ids]
        positions = [wanted[id_].position for id_ in ids]
        for row, id_ in zip(rows, ids, strict=True):
            self._feed(row, wanted[id_])
        sampling = [row.sampling for row in rows]
        picked = draw(logits, sampling, positions)
        logprobs = Logprobs(logits, picked.tokens, sampling)
        mx.eval(picked.arrays, logprobs.arrays, mlxlm.states(caches))
        tokens, redrawn = picked.settle()
        if redrawn:
            logprobs = Logprobs(logits, mx.array(tokens, mx.int32), sampling)
        found = logprobs.read()
        return {
            id_: RowTokens(id=id_, tokens=(tokens[i],), logprobs=(found[i],) if i in found else ())
            for i, id_ in enumerate(ids)
        }

    def _forward(self, wanted: Mapping[str, DecodeRow]) -> tuple[Any, list[str], Caches]:
        """Logits (B, V), not evaluated, with the rows' ids in their order and all caches that they change."""
        if self._model.batched:
            self._batch.arrange(list(wanted), self._rows, self._own)
            ids = list(self._batch.ids)
            return self._model.decode([wanted[id_].token for id_ in ids], self._batch.caches), ids, self._batch.caches
        logits = [self._model.decode([row.token], self._own[id_]) for id_, row in wanted.items()]
        caches = [cache for id_ in wanted for cache in self._own[id_]]
        return mx.concatenate(logits), list(wanted), caches

    def _feed(self, row: _Row, decode: DecodeRow) -> None:
        assert len(row.request.prompt) + decode.position == row.cached + 1, "the prompt must be in the cache"
        row.sampling.fed(decode.token, decode.position)
        row.cached += 1
