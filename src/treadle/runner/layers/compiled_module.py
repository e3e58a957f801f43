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
from ..kv.seen_queries import compiled_pass
from ..mlxlm import Injection, Selection, injecting
from ..mlxlm.hooks import kept, selected
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

    def __call__(self, tokens: Any, cache: Sequence[Any], injection: Injection | None = None) -> Any:
        """Logits of the selected `tokens` (T, 1). Passes with an `injection` are not compiled."""
        if injection is not None:
            with injecting(self._module, injection):
                return self._module(tokens, cache=cache)
        if self._caches is None or self._caches.arrangement is not cache:
            self._caches = LayerCaches.of(cache)
        caches, selection = self._caches, self._selection
        if self.refused or not _only_decode(caches):
            return self._module(tokens, cache=cache)
        rows, keep = (None, None) if selection is None else (selection.rows, selection.keep)
        try:
            logits, written, *states = self._computed(tokens, rows, keep, caches)
        except FAULTS as error:
            self._refuse(f"{type(error).__name__}: {error}")
            with selected(selection, rows):
                return self._module(tokens, cache=cache)
        caches.paged[-1].written = written
        if selection is not None:
            selection.states += states
        return logits

    def _computed(self, tokens: Any, rows: Any | None, keep: Any | None, caches: LayerCaches) -> Any:
        step = caches.step
        shapes, arrays = step.inputs(step.kinds)
        arrays = [*caches.slots, *arrays]
        whole = keep is ...  # no input of a program
        keep = None if whole else keep
        places = tuple(None if some is None else some.shape for some in (rows, keep))
        layers = () if self._selection is None else self._selection.layers
        key = shapes, places, whole, layers, step.seen is None, tuple(array.shape for array in caches.slots)
        return step.compiled.call(
            key,
            lambda: self._compiled(caches, step.template(step.kinds), whole=whole),
            *(step.seen, tokens, rows, keep, arrays),
        )

    def _compiled(self, caches: LayerCaches, template: PagedPass, *, whole: bool) -> Callable[..., Any]:
        return compiled_pass(self._compile, self._program(caches, template, whole=whole), template.seen)

    def _program(self, caches: LayerCaches, template: PagedPass, *, whole: bool) -> Callable[..., Any]:
        """The pass as a function of its arrays. It returns logits, an array computed from all pages that are written,
        and hidden states if some are kept, or the `whole` pass's; logits of batches that only decode are computed from
        all recurrent states.
        """

        def program(tokens: Any, rows: Any | None, keep: Any | None, arrays: Sequence[Any]) -> tuple[Any, ...]:
            count = len(caches.slots)
            with caches.tracing(arrays[:count]), selected(self._selection, rows), self._layers.traced():
                cache, last = _over(caches, template.filled(arrays[count:]))
                with kept(self._selection, ... if whole else keep) as states:
                    logits = self._module(tokens, cache=cache)
                return logits, last.written, *states

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
