"""A model's own module as compiled passes over pages, for batches that only decode.

A small model's step takes the host longer than the device: its module makes hundreds of operations in Python. A
compiled pass is made once for each batch size, as that of fused layers is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..device.self_test import FAULTS
from ..kv.layer_caches import LayerCaches
from ..kv.paged.layer import PagedLayer
from ..kv.paged.paged_pass import PagedPass
from ..mlxlm import Selection
from ..mlxlm.hooks import selected
from .replace import ReplacedLayers

_log = logging.getLogger(__name__)


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
        self._caches: LayerCaches | None = None

    def __call__(self, tokens: Any, cache: Sequence[Any]) -> Any:
        """Logits of the selected `tokens` (T, 1)."""
        if self._caches is None or self._caches.arrangement is not cache:
            self._caches = LayerCaches.of(cache)
        caches, selection = self._caches, self._selection
        keeps = selection is not None and selection.keep is not None
        if self.refused or keeps or not _only_decode(caches):
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

    def _computed(self, tokens: Any, rows: Any | None, caches: LayerCaches) -> Any:
        step = caches.step
        shapes, arrays = step.inputs(step.kinds)
        arrays = [*caches.slots, *arrays]
        key = shapes, None if rows is None else rows.shape, tuple(array.shape for array in caches.slots)
        program = step.compiled.get(key, lambda: self._compile(self._program(caches, step.template(step.kinds))))
        return program(tokens, rows, arrays)

    def _program(self, caches: LayerCaches, template: PagedPass) -> Callable[..., Any]:
        """The pass as a function of its arrays. It returns logits, and an array computed from all pages that are
        written; logits of batches that only decode are computed from all recurrent states."""

        def program(tokens: Any, rows: Any | None, arrays: Sequence[Any]) -> tuple[Any, Any]:
            count = len(caches.slots)
            with caches.tracing(arrays[:count]), selected(self._selection, rows), self._layers.traced():
                cache, last = _over(caches, template.filled(arrays[count:]))
                logits = self._module(tokens, cache=cache)
                return logits, last.written

        return program

    def _refuse(self, reason: str) -> None:
        self.refused = " ".join(reason.split())
        _log.info("the model's passes can't be compiled (%s): steps of small models are slower", self.refused)


def _only_decode(caches: LayerCaches) -> bool:
    """Whether the step's kinds of layers are known, and none of its tokens is a prompt's."""
    return bool(caches.paged and caches.step.kinds) and caches.step.decode_tokens == caches.step.count


def _over(caches: LayerCaches, step: PagedPass) -> tuple[list[Any], PagedLayer]:
    """Caches for `step` in the model's arrangement, and the last one with pages."""
    paged = {id(layer): PagedLayer(layer.kind, layer.kernels, layer.pool, step) for layer in caches.paged}
    arranged = [
        [paged.get(id(leaf), leaf) for leaf in one] if isinstance(one, list) else paged.get(id(one), one)
        for one in caches.arrangement
    ]
    return arranged, paged[id(caches.paged[-1])]
