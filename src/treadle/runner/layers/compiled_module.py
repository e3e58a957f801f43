"""A model's own module as compiled passes over pages, for batches that only decode.

A small model's step takes the host longer than the device: its module makes hundreds of operations in Python. A
compiled pass is made once for each batch size, as that of fused layers is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..device.self_test import FAULTS
from ..kv.paged.layer import PagedLayer
from ..kv.paged.paged_pass import PagedPass
from ..mlxlm import FETCHED, Selection
from ..mlxlm.hooks import selected
from ..recurrent.layer import RecurrentLayer
from .replace import ReplacedLayers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Caches:
    """A model's caches in their `arrangement`: those of layers with pages, and with slots."""

    arrangement: Sequence[Any]
    paged: Sequence[PagedLayer]
    recurrent: Sequence[RecurrentLayer]

    @classmethod
    def of(cls, cache: Sequence[Any]) -> _Caches:
        leaves = [leaf for one in cache for leaf in (one if isinstance(one, list) else [one])]
        paged = [leaf for leaf in leaves if isinstance(leaf, PagedLayer)]
        return cls(cache, paged, [leaf for leaf in leaves if isinstance(leaf, RecurrentLayer)])

    @property
    def step(self) -> PagedPass:
        return self.paged[0].step

    @property
    def only_decode(self) -> bool:
        """Whether the step's kinds of layers are known, and none of its tokens is a prompt's."""
        return bool(self.paged and self.step.kinds) and self.step.decode_tokens == self.step.count

    @property
    def slots(self) -> list[Any]:
        """The step's arrays for recurrent layers."""
        return [] if not self.recurrent else [self.recurrent[0].step.table, self.recurrent[0].step.rows]

    @contextmanager
    def traced(self, step: PagedPass, slots: Sequence[Any]) -> Iterator[tuple[list[Any], list[PagedLayer]]]:
        """Give caches for `step`, in the model's arrangement and those with pages, while recurrent layers have the
        arrays `slots`."""
        paged = [PagedLayer(layer.kind, layer.kernels, layer.pool, step) for layer in self.paged]
        new = dict(zip(map(id, self.paged), paged, strict=True))
        cache = [
            [new.get(id(leaf), leaf) for leaf in one] if isinstance(one, list) else new.get(id(one), one)
            for one in self.arrangement
        ]
        before = self.slots
        try:
            self._put(slots)
            yield cache, paged
        finally:
            self._put(before)
            FETCHED.clear()

    def _put(self, slots: Sequence[Any]) -> None:
        if self.recurrent:
            self.recurrent[0].step.replace(*slots)
            for layer in self.recurrent:
                layer.take_written()  # arrays of a trace are no arrays


class CompiledModule:
    """Computes `module`'s passes over pages, with `selection` before its head and its faster `layers`; `compile` is
    MLX's.

    The first pass, and those with prompts, are not compiled. Nor is any other once one can't be: the module may read
    numbers in Python that only the device has. `refused` is the reason then.
    """

    def __init__(
        self, module: Any, selection: Selection | None, layers: ReplacedLayers, compile: Callable[..., Any]
    ) -> None:
        self.refused = ""
        self._module = module
        self._selection = selection
        self._layers = layers
        self._compile = compile
        self._caches: _Caches | None = None

    def __call__(self, tokens: Any, cache: Sequence[Any]) -> Any:
        """Logits of the selected `tokens` (T, 1)."""
        if self._caches is None or self._caches.arrangement is not cache:
            self._caches = _Caches.of(cache)
        caches, selection = self._caches, self._selection
        keeps = selection is not None and selection.keep is not None
        if self.refused or keeps or not caches.only_decode:
            return self._module(tokens, cache=cache)
        rows = None if selection is None else selection.rows
        try:
            logits, written = self._computed(tokens, rows, caches)
        except FAULTS as error:
            self._refuse(f"{type(error).__name__}: {error}")
            with selected(selection, rows):
                return self._module(tokens, cache=cache)
        caches.paged[-1].written = written
        return logits

    def _computed(self, tokens: Any, rows: Any | None, caches: _Caches) -> Any:
        step = caches.step
        shapes, arrays = step.inputs(step.kinds)
        arrays = [*caches.slots, *arrays]
        key = shapes, None if rows is None else rows.shape, tuple(array.shape for array in caches.slots)
        program = step.compiled.get(key, lambda: self._compile(self._program(caches, step.template(step.kinds))))
        return program(tokens, rows, arrays)

    def _program(self, caches: _Caches, template: PagedPass) -> Callable[..., Any]:
        """The pass as a function of its arrays. It returns logits, and an array computed from all pages that are
        written; logits of batches that only decode are computed from all recurrent states."""

        def program(tokens: Any, rows: Any | None, arrays: Sequence[Any]) -> tuple[Any, Any]:
            count = len(caches.slots)
            with caches.traced(template.filled(arrays[count:]), arrays[:count]) as (cache, paged):
                with selected(self._selection, rows), self._layers.traced():
                    logits = self._module(tokens, cache=cache)
                return logits, paged[-1].written

        return program

    def _refuse(self, reason: str) -> None:
        self.refused = " ".join(reason.split())
        _log.info("the model's passes can't be compiled (%s): steps of small models are slower", self.refused)
