"""Blocks of layers on the CPU as compiled functions of a few tokens: recurrent mixers, mixtures of experts, and other
feed-forward blocks.

A block of a small model consists of dozens of operations, which take longer to make in Python, one by one, than to
compute. Compiled they are made by one call, and neighbours among them become one operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device.self_test import FAULTS
from ..mlxlm import has_convolution
from ..recurrent.layer import RecurrentLayer, TracedStates
from .replace import Faster, Maker, full_name, own_call

_log = logging.getLogger(__name__)

MOST_TOKENS = 16
"""The most tokens of a compiled call. Each number of them has a program of its own."""
_SWITCH = "mlx_lm.models.switch_layers"
_EXPERTS = {f"{_SWITCH}.SwitchGLU", f"{_SWITCH}.SwitchMLP"}
_FEED_FORWARD = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "fc1", "fc2", "c_fc", "c_proj"}
"""Names of the layers of a feed-forward block, in most modules."""

_Program = Callable[[Any, Sequence[Any]], tuple[Any, Sequence[Any]]]
_Kinds = tuple[type, ...]


class CompiledBlock:
    """The call `own` of a block, compiled for one array (T, 1, ...) and maybe a recurrent cache.

    A number of tokens is compiled when it comes for the second time. Other calls are `own`'s: those with more
    arguments, or with several tokens of a sequence, and those that can't be compiled, as where a block reads numbers in
    Python.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own
        self._programs: dict[Any, _Program] = {}
        self._failed: set[Any] = set()

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Return what `own` returns."""
        values = (*args, *named.values())
        kinds = tuple(map(type, values))
        x, cache = _inputs(values, kinds)
        key = None if x is None else (x.shape, x.dtype, kinds, *named)
        if x is None or key in self._failed:
            return self._own(*args, **named)
        states = () if cache is None else cache.states_of_singles(x.shape[0])
        if states is None:
            return self._own(*args, **named)
        if key not in self._programs:
            self._programs[key] = mx.compile(
                partial(_traced, self._own, kinds, tuple(named), None if cache is None else cache.traced)
            )
            return self._own(*args, **named)
        try:
            y, behind = self._programs[key](x, states)
        except FAULTS as error:
            _log.debug("a block of the model is not compiled for %d tokens: %s", x.shape[0], error)
            self._failed.add(key)
            return self._own(*args, **named)
        if cache is not None:
            cache.write_singles(behind)
        return y


def _inputs(values: Sequence[Any], kinds: _Kinds) -> tuple[Any | None, RecurrentLayer | None]:
    """The only array of a call with these arguments, (T, 1, ...) with few tokens, and its recurrent cache if it has
    one; no array where there are other arguments."""
    caches = kinds.count(RecurrentLayer)
    if kinds.count(mx.array) != 1 or caches > 1 or kinds.count(NoneType) != len(kinds) - 1 - caches:
        return None, None
    x = values[kinds.index(mx.array)]
    if x.shape[0] > MOST_TOKENS or x.shape[1:-1] != (1,):
        return None, None
    return x, values[kinds.index(RecurrentLayer)] if caches else None


def _traced(
    own: Callable[..., Any],
    kinds: _Kinds,
    names: Sequence[str],
    traced: TracedStates | None,
    x: Any,
    states: Sequence[Any],
) -> tuple[Any, Sequence[Any]]:
    """A block's outputs, and its states behind them, of a call with arguments of these `kinds`, the last ones by
    `names`."""

    def call(cache: RecurrentLayer | None) -> Any:
        values = [x if kind is mx.array else cache if kind is RecurrentLayer else None for kind in kinds]
        placed = len(kinds) - len(names)
        return own(*values[:placed], **dict(zip(names, values[placed:], strict=True)))

    return (call(None), ()) if traced is None else traced.run(call, states)


class CompiledBlocks:
    """The blocks of a `module` that are compiled: those with experts or of feed-forward layers alone, and what has the
    convolutions in a layer. Where two blocks have some, neither is: a compiled one writes all states of the layer."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._mixers: set[int] | None = None

    def maker_of(self, layer: Any) -> Maker | None:
        """A maker for `layer`, if it is such a block."""
        if callable(layer) and any(full_name(type(part)) in _EXPERTS for part in layer.children().values()):
            return partial(_compiled, "mixtures of experts")
        names = set(layer.children())
        if callable(layer) and len(names) > 1 and names <= _FEED_FORWARD:
            return partial(_compiled, "feed-forward blocks")
        if self._mixers is None:
            found = [_with_convolutions(layer) for layer in getattr(self._module, "layers", ())]
            self._mixers = {id(parts[0]) for parts in found if len(parts) == 1}
        return partial(_compiled, "recurrent mixers") if id(layer) in self._mixers else None


def _with_convolutions(layer: Any) -> list[Any]:
    """The parts of a layer that have convolutions."""
    parts = (part for part in layer.children().values() if isinstance(part, nn.Module))
    return [part for part in parts if has_convolution(part)]


def _compiled(label: str, layer: Any) -> Faster:
    """A compiled block, which is tested with the KV backend: its own call is what is compiled."""
    return Faster({"__call__": CompiledBlock(own_call(layer))}, (type(layer), label), f"compiled {label}", lambda: ())
