"""Admission of sequences to the runner: their rows, and the cached prefixes that they begin with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ..core.plan import Admit
from ..grammar.compiler import GrammarCompiler
from ..grammar.faults import has_failed
from .device.owner_thread import OutOfMemory, mlx_runtime
from .forward.positions import SequencePositions
from .kv.backend import KvBackend
from .loading.model import LoadedModel
from .sampling.constraints import GrammarGone, row_constraint
from .sampling.sampler import SamplingRow
from .step import RunningRow, Step, check_tokens
from .vision.encoder import ImageEncoder


class Admission:
    """Admits sequences of `model`, which are in neither yet, to `backend` and to the registry `rows`."""

    def __init__(
        self,
        model: LoadedModel,
        backend: KvBackend,
        rows: dict[str, RunningRow],
        grammars: GrammarCompiler,
        images: ImageEncoder,
    ) -> None:
        self._vocabulary = model.vocabulary
        self._embedding = model.embedding
        self._backend = backend
        self._rows = rows
        self._grammars = grammars
        self._images = images

    def admit(self, admits: Sequence[Admit], step: Step) -> None:
        """Register new sequences, and take over their cached prefixes before anything is allocated."""
        rows = [row for admit in admits if (row := self._register(admit, step)) is not None]
        step.evicted |= self._reuse([row for row in rows if not row.request.computes_whole_prompt])
        for row in rows:
            if row.id not in step.evicted:
                self._backend.admit(row)

    def _register(self, admit: Admit, step: Step) -> RunningRow | None:
        request, vocabulary = admit.request, self._vocabulary
        tokens = [*request.prompt, *admit.history]
        try:
            check_tokens(tokens, vocabulary)
            constraint = row_constraint(request, admit.history, vocabulary, self._grammars)
            sampling = SamplingRow(request, admit.history, vocabulary, constraint)
            pool = self._embedding.pool(request.pooling, len(tokens))
            images = self._images.admit(request, admit.cached_tokens)
        except GrammarGone:
            step.evicted.add(request.id)
            return None
        except (ValueError, TypeError, OverflowError) as error:
            step.failed[request.id] = str(error)
            if request.constraint is not None and has_failed(str(error)):
                self._grammars.forget(request.constraint)
            return None
        row = RunningRow(request.id, request.salt, tokens, request, sampling, admit.cached_tokens, pool, images=images)
        if images is not None and images.positions is not None:
            row.positions = SequencePositions(images.positions)
        row.skipped, row.private = admit.skipped, admit.skipped > 0
        self._rows[request.id] = row
        return row

    def _reuse(self, rows: list[RunningRow]) -> set[str]:
        """Take over cached prefixes. Return the ids of sequences that did not get theirs, which are forgotten."""
        if not rows:
            return set()
        found = [0] * len(rows)
        with suppress(OutOfMemory), mlx_runtime("reusing a prompt"):
            found = self._backend.reuse([(row, row.cached) for row in rows])
        evicted = [row for row, count in zip(rows, found, strict=True) if count != row.cached]
        self._backend.invalidate(evicted)
        for row in evicted:
            del self._rows[row.id]
            self._images.release(row.images)
        return {row.id for row in evicted}
