"""A ragged pass over a model with recurrent layers: slots by hand, and attention over padded histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.runner.mlxlm import connect
from treadle.runner.recurrent.layer import Recurrences, RecurrentLayer
from treadle.runner.recurrent.step import FRESH, PADDING, RecurrentPass, SlotSegment, tables


class History:
    """Keys and values of each sequence; a batch's token sees those of its own up to itself."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._kept: dict[str, list[Any]] = {}

    @property
    def offset(self) -> Any:
        return mx.array([position for _, position in self._harness.tokens])

    def make_mask(self, *_: Any, **__: Any) -> Any:
        positions = np.array([position for _, position in self._harness.tokens])
        return mx.array(np.arange(positions.max() + 1) <= positions[:, None])[:, None, None]

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        for i, (name, position) in enumerate(self._harness.tokens):
            kept = self._kept.setdefault(name, [])
            del kept[position:]  # a padding sequence begins anew
            kept.append((keys[i : i + 1], values[i : i + 1]))
        longest = 1 + max(position for _, position in self._harness.tokens)
        names = [name for name, _ in self._harness.tokens]
        return self._padded(names, 0, longest), self._padded(names, 1, longest)

    def _padded(self, names: Sequence[str], which: int, longest: int) -> Any:
        rows = []
        for name in names:
            own = [one[which] for one in self._kept[name]]
            rows.append(mx.concatenate([*own, *[mx.zeros_like(own[0])] * (longest - len(own))], axis=2)[:, :, :longest])
        return mx.concatenate(rows)


class Harness:
    """Passes over `model`, whose recurrent layers have `slots` slots."""

    def __init__(self, model: Any, recurrences: Recurrences, slots: int = 12) -> None:
        library = connect()
        self.step = RecurrentPass()
        self.tokens: list[tuple[str, int]] = []
        self.slots: dict[str, int] = {}
        self._model = model
        self._seen: dict[str, int] = {}
        self._free = list(range(slots))
        states = iter(library.recurrent_states(model))
        self.recurrent: list[RecurrentLayer] = []

        def leaf(cache: Any) -> Any:
            if hasattr(cache, "caches"):
                return [leaf(one) for one in cache.caches]
            own = next(states)
            if own is None:
                return History(self)
            self.recurrent.append(RecurrentLayer(own, slots, recurrences, self.step))
            return self.recurrent[-1]

        self._caches = [leaf(cache) for cache in library.new_caches(model)]

    def run(self, chunks: Mapping[str, Sequence[int]], *, padding: int = 0) -> dict[str, Any]:
        """Logits (V,) of the last token of each sequence, of which `chunks` has the next tokens."""
        segments, ids, first, after = [], [], 0, {}
        self.tokens = []
        for name, chunk in chunks.items():
            source, target = self.slots.get(name, FRESH), self._free.pop(0)
            segments.append(SlotSegment(first, len(chunk), source, target))
            after[name] = target
            start = self._seen.get(name, 0)
            self.tokens += [(name, start + i) for i in range(len(chunk))]
            self._seen[name] = start + len(chunk)
            ids += list(chunk)
            first += len(chunk)
        if padding:
            segments.append(SlotSegment(first, padding, PADDING, FRESH))
            self.tokens += [("", i) for i in range(padding)]
            ids += [0] * padding
        self.step.begin(segments, *map(mx.array, tables(segments)))
        logits = self._model(mx.array(ids)[:, None], cache=self._caches)[:, 0]
        mx.eval(logits)
        for name, target in after.items():
            if name in self.slots:
                self._free.append(self.slots[name])
            self.slots[name] = target
        return {
            name: logits[segment.first + segment.count - 1] for name, segment in zip(chunks, segments, strict=False)
        }
