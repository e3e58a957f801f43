"""Sampling of a step's rows, at once or when the tokens of the step before are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .device.staging import Put
from .loading.model import LoadedModel
from .sampling.logprobs import Logprobs
from .sampling.sampler import SamplingRow, draw
from .sampling.token_masks import TokenMasks
from .step import SampledGroup, Step


class StepSampler:
    """Samples the rows of steps of `model`. `put` uploads arrays. With `lookahead` nothing waits for the device."""

    def __init__(self, model: LoadedModel, put: Put, lookahead: bool) -> None:
        self._model = model
        self._put = put
        self._lookahead = lookahead
        self._overlaps = model.device != "cpu"
        self._masks = TokenMasks(model.vocabulary)

    def start(self, step: Step, follows: bool) -> None:
        """Sample the rows of a step whose forward pass is built. Where it `follows` a step that is not finished, and
        some rows depend on their tokens of that step, all are deferred: they are sampled while the device runs the
        pass, and one group takes the host less time than two. Otherwise they are drawn at once, and bitmasks are filled
        while the device runs the pass; before it on a CPU, whose cores the pass needs."""
        rows, places = step.sampling, step.places
        step.groups = []
        step.deferred = []
        if follows or self._overlaps:
            waits = any(rows[i].depends_on_last_token if follows else rows[i].limited for i in places)
            step.deferred = list(places) if waits else []
        self._draw(step, () if step.deferred else places, limited=not follows)
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

    def _draw(self, step: Step, places: Sequence[int], *, limited: bool = False) -> None:
        """Sample a token for each row at `places`; waits for the device only without lookahead. `limited`: constraints
        may limit the rows."""
        arrays = [*step.computed.arrays, *(array for scores in step.scores.values() for array in scores.arrays)]
        if places:
            arrays += self._group(step, places, limited)
        elif step.deferred:
            arrays.append(step.computed.logits)
        if self._lookahead or step.deferred:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        elif arrays:
            mx.eval(arrays)

    def _group(self, step: Step, places: Sequence[int], limited: bool) -> list[Any]:
        """Add a group of sampled rows to the step. Return its arrays."""
        put, decodes = self._put, step.decodes
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
