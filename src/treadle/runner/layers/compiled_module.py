"""A model's own module as compiled passes over pages, for batches that only decode.

A small model's step takes the host longer than the device: its module makes hundreds of operations in Python. A
compiled pass is made once for each batch size, as that of fused layers is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..device.self_test import FAULTS
from ..kv.paged.layer import PagedLayer
from ..kv.paged.paged_pass import PagedPass
from ..mlxlm import FETCHED, Selection
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

    def __call__(self, tokens: Any, cache: Sequence[PagedLayer]) -> Any:
        """Logits of the selected `tokens` (T, 1)."""
        step, selection = cache[0].step, self._selection
        keeps = selection is not None and selection.keep is not None
        if self.refused or keeps or not step.kinds or step.decode_tokens < step.count:
            return self._module(tokens, cache=cache)
        rows = None if selection is None else selection.rows
        try:
            logits, cache[-1].written = self._computed(tokens, rows, step, cache)
        except FAULTS as error:
            self._refuse(f"{type(error).__name__}: {error}")
            with selected(selection, rows):
                return self._module(tokens, cache=cache)
        return logits

    def _computed(self, tokens: Any, rows: Any | None, step: PagedPass, cache: Sequence[PagedLayer]) -> Any:
        shapes, arrays = step.inputs(step.kinds)
        key = shapes, None if rows is None else rows.shape
        program = step.compiled.get(key, lambda: self._compile(self._program(cache, step.template(step.kinds))))
        return program(tokens, rows, arrays)

    def _program(self, cache: Sequence[PagedLayer], template: PagedPass) -> Callable[..., Any]:
        """The pass as a function of its arrays. It returns logits, and an array computed from all that is written."""

        def program(tokens: Any, rows: Any | None, arrays: Sequence[Any]) -> tuple[Any, Any]:
            step = template.filled(arrays)
            layers = [PagedLayer(layer.kind, layer.kernels, layer.pool, step) for layer in cache]
            try:
                with selected(self._selection, rows), self._layers.traced():
                    logits = self._module(tokens, cache=layers)
            finally:
                FETCHED.clear()
            return logits, layers[-1].written

        return program

    def _refuse(self, reason: str) -> None:
        self.refused = " ".join(reason.split())
        _log.info("the model's passes can't be compiled (%s): steps of small models are slower", self.refused)
