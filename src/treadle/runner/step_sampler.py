"""Sampling of a step's rows, at once or when the tokens of the step before are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .device.staging import Put
from .kv.backend import KvBackend
from .loading.model import LoadedModel
from .sampling.logprobs import Logprobs
from .sampling.sampler import SamplingRow, draw
from .sampling.token_masks import TokenMasks
from .step import SampledGroup, Step
from .verification import picks_of


class StepSampler:
    """Samples the rows of steps of `model`, whose caches are in `backend`. `put` uploads arrays. With lookahead nothing
    waits for the device but the launch of a step, where `backend` needs that."""

    def __init__(self, model: LoadedModel, put: Put, backend: KvBackend) -> None:
        self._model = model
        self._put = put
        self._lookahead = backend.lookahead > 0
        self._launches_ahead = backend.launches_ahead
        self._overlaps = model.device != "cpu"
        self._masks = TokenMasks(model.vocabulary)

    def start(self, step: Step, before: Step | None) -> None:
        """Sample the rows of a step whose forward pass is built. Where the step `before` is not finished, and some
        rows depend on their tokens of that step, all are deferred: they are sampled while the device runs the
        pass, and one group takes the host less time than two. Otherwise they are drawn at once, and bitmasks are filled
        while the device runs the pass; before it on a CPU, whose cores the pass needs."""
        rows, places, follows = step.sampling, step.places, before is not None
        step.groups = []
        step.deferred = []
        if follows or self._overlaps:
            waits = any(rows[i].depends_on_last_token if follows else rows[i].limited for i in places)
            waits = waits or any(state.limited for drafts in step.drafts.values() for state in drafts.states)
            step.deferred = list(places) if waits else []
        self._draw(step, () if step.deferred else places, limited=not follows, before=before)
        if not follows:
            self.draw_deferred(step)

    def draw_deferred(self, step: Step) -> None:
        """Sample the rows that have waited for the tokens of the step before."""
        places, step.deferred = step.deferred, []
        if places:
            self._draw(step, places, limited=True)

    def defer_limited(self, step: Step) -> None:
        """Defer the rows that were drawn too early, where none wait already: their last token has begun a grammar, or
        ended a reasoning. They are drawn again."""
        if not step.deferred:
            rows = step.sampling
            step.deferred = [i for i in step.places if rows[i].limited]

    def _draw(self, step: Step, places: Sequence[int], *, limited: bool = False, before: Step | None = None) -> None:
        """Sample a token for each row at `places`. `limited`: constraints may limit the rows. `before` is the step
        before, where that is not finished."""
        arrays = [*step.computed.arrays, *(array for scores in step.scores.values() for array in scores.arrays)]
        if places:
            arrays += self._group(step, places, limited)
        elif step.deferred:
            arrays.append(step.computed.logits)
        if self._lookahead or step.deferred:
            self._launch(step, arrays, before)
        elif arrays:
            mx.eval(arrays)

    def _launch(self, step: Step, arrays: list[Any], before: Step | None) -> None:
        """Begin the evaluation of a step's `arrays`. If they take the place of others that the step `before` uses, wait
        for that, and keep only such as the next step does not change."""
        if not self._launches_ahead:
            if before is not None:
                mx.eval(before.awaited)
            step.computed.arrays = []
            if step.deferred:
                step.computed.arrays = [step.computed.logits]
            elif not step.groups and arrays:
                arrays = [*arrays, marker := _marker(arrays)]
                step.computed.arrays = [marker]
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]

    def _group(self, step: Step, places: Sequence[int], limited: bool) -> list[Any]:
        """Add a group of sampled rows to the step. Return its arrays."""
        put, decodes = self._put, step.decodes
        if step.drafts:
            picks = picks_of(step)
            rows, positions, logits = picks.rows, picks.positions, picks.logits(step, put=put)
        else:
            if len(places) < len(decodes):
                decodes = [decodes[place] for place in places]
            rows, logits = [step.rows[decode.id].sampling for decode in decodes], step.logits_of(decodes, put)
            positions = [decode.position for decode in decodes]
        drawn = draw(logits, rows, positions, self._model.draws, put, self._masked(rows) if limited else None)
        if self._model.lands is not None:
            drawn.send(self._model.lands)
        logprobs = Logprobs(logits, drawn.tokens, rows, put)
        step.groups.append(SampledGroup(places, drawn, logprobs))
        return [*drawn.arrays, *logprobs.arrays]

    def _masked(self, rows: Sequence[SamplingRow]) -> Callable[[Any], Any] | None:
        """Fill the bitmasks of `rows`. Return a function that masks their logits; None if all may sample any token."""
        if not any(row.limited for row in rows):
            return None
        words = self._masks.fill([row.constraint if row.limited else None for row in rows])
        return lambda logits: self._model.masks(logits, words, self._put)


def _marker(arrays: list[Any]) -> Any:
    """Return a new array of one number that is evaluated behind `arrays`."""
    first = next(array for _, array in tree_flatten(arrays) if isinstance(array, mx.array))
    return first.reshape(-1)[:1] * 1
