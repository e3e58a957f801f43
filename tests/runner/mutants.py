"""Faults of a KV backend that its self-test must find, put into the contiguous one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

from treadle.runner.kv.backend import Clock, Live
from treadle.runner.kv.contiguous import layer as contiguous_layer
from treadle.runner.kv.contiguous.backend import ContiguousBackend, ContiguousConfig
from treadle.runner.kv.contiguous.layer import ContiguousLayer

Methods = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Mutated:
    """The backend of `config`, in which layers have other `methods`: those numbered in `layers`, or all."""

    config: ContiguousConfig
    methods: Methods
    layers: Collection[int] | None = None

    def build(self, module: Any, live: Live, clock: Clock = time.monotonic) -> ContiguousBackend:
        backend = self.config.build(module, live, clock)
        for i, layer in enumerate(backend.layers):
            if self.layers is None or i in self.layers:
                layer.__class__ = type("Mutant", (ContiguousLayer,), self.methods)
        return backend


def _positions_late(self: Any) -> Any:
    step = self._step
    return step.positions if step.longer else step.positions + 1


def _full(self: Any, queries: Any, piece: Any, scale: float, window: int, sinks: Any) -> Any:
    keys, values = self._seen(piece, window)
    out = contiguous_layer._fused(queries, keys, values, scale=scale, mask=None, sinks=sinks)
    return out[0].transpose(1, 0, 2)[:, :, None]


def _heads_swapped(self: Any, keys: Any, values: Any) -> Any:
    return ContiguousLayer.update_and_fetch(self, keys, values[:, ::-1])


def _keys_for_values(self: Any, keys: Any, values: Any) -> Any:
    return ContiguousLayer.update_and_fetch(self, values, keys)


def _oldest_unseen(self: Any, piece: Any, window: int) -> Any:
    keys, values = ContiguousLayer._seen(self, piece, window)
    return (keys[:, :, 1:], values[:, :, 1:]) if keys.shape[2] > 1 else (keys, values)


_WIDE = 1 << 12
"""Tokens by which buffers of a wrong window keep more than that."""


def _window_of(change: int) -> Callable[..., Any]:
    def attend(self: Any, queries: Any, keys: Any, values: Any, scale: float, window: int, sinks: Any) -> Any:
        wide = self._window
        self._window = wide and wide - _WIDE + change
        try:
            return ContiguousLayer.attend(self, queries, keys, values, scale, 0, sinks)
        finally:
            self._window = wide

    return attend


MUTANTS: dict[str, Methods] = {
    "a position late when decoding": {"offset": property(_positions_late)},
    "no causal mask": {"_attend_longer": _full},
    "kv heads of values swapped": {"update_and_fetch": _heads_swapped},
    "keys for values": {"update_and_fetch": _keys_for_values},
    "oldest token unseen": {"_seen": _oldest_unseen},
}
"""By name, the methods of a wrong layer."""
WINDOW_MUTANTS: dict[str, Methods] = {
    "window one longer": {"attend": _window_of(1)},
    "window one shorter": {"attend": _window_of(-1)},
    "no window": {"attend": _window_of(_WIDE)},
}


def mutated(config: ContiguousConfig, name: str, layers: Collection[int] | None = None) -> Mutated:
    """The backend of `config` with the fault of that name."""
    if name in WINDOW_MUTANTS:
        wide = dataclasses.replace(config, windows=[window and window + _WIDE for window in config.windows])
        return Mutated(wide, WINDOW_MUTANTS[name])
    return Mutated(config, MUTANTS[name], layers)
