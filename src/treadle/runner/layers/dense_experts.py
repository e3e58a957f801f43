"""Mixtures of experts on the CPU: the tokens of each expert in one product of BLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from .replace import Faster, Makers, full_name, own_call

LEAST_PAIRS = 8
"""Pairs of tokens and experts, per expert, from which on it pays: it takes 0.38 of the time of MLX's product, which
goes token by token, and with half as many 0.58 to 1.27."""
_SWITCH = "mlx_lm.models.switch_layers"


class DenseExperts:
    """Experts with weights in float32, `first` and `last` behind `activation`, in MLX's linear layers for one expert
    each. Fewer pairs, and x of other types, go to `own`."""

    def __init__(
        self, first: Sequence[Any], last: Any, activation: Callable[..., Any], own: Callable[[Any, Any], Any]
    ) -> None:
        self._first = first
        self._last = last
        self._activation = activation
        self._own = own
        self._experts = int(last.weight.shape[0])

    def __call__(self, x: Any, indices: Any) -> Any:
        """(..., k, N) of `x` (..., K) and the experts `indices` (..., k) of each token, which are read."""
        if indices.size < LEAST_PAIRS * self._experts or x.dtype != mx.float32:
            return self._own(x, indices)
        chosen = np.array(indices).reshape(-1)
        order = np.argsort(chosen, kind="stable")
        ends = np.searchsorted(chosen[order], np.arange(self._experts + 1)).tolist()
        rows = x.reshape(-1, x.shape[-1])[mx.array(order // indices.shape[-1])]
        parts = [self._expert(rows[a:b], expert) for expert, (a, b) in enumerate(pairwise(ends)) if a < b]
        return mx.concatenate(parts)[mx.array(np.argsort(order))].reshape(*indices.shape, -1)

    def _expert(self, x: Any, expert: int) -> Any:
        h = self._activation(*(_linear(one, x, expert) for one in self._first))
        return _linear(self._last, h, expert)


def makers() -> Makers:
    """Makers by the full names of classes."""
    return {f"{_SWITCH}.SwitchGLU": _switch_glu, f"{_SWITCH}.SwitchMLP": _switch_mlp}


def _switch_glu(layer: Any) -> Faster | None:
    return _faster(layer, [layer.up_proj, layer.gate_proj], layer.down_proj)


def _switch_mlp(layer: Any) -> Faster | None:
    return _faster(layer, [layer.fc1], layer.fc2)


def _faster(layer: Any, first: Sequence[Any], last: Any) -> Faster | None:
    if any(not _is_plain(one) for one in (*first, last)):
        return None
    dense = DenseExperts(first, last, layer.activation, own_call(layer))
    experts, hidden, columns = first[0].weight.shape
    label = f"experts ({experts} of {columns} x {hidden})"
    return Faster({"__call__": dense}, (type(layer), first[0].weight.shape), label, lambda: _examples(experts, columns))


def _is_plain(layer: Any) -> bool:
    return full_name(type(layer)) == f"{_SWITCH}.SwitchLinear" and bool(layer.weight.dtype == mx.float32)


def _linear(layer: Any, x: Any, expert: int) -> Any:
    y = x @ layer.weight[expert].T
    return y + layer.bias[expert] if "bias" in layer else y


def _examples(experts: int, columns: int) -> Iterator[tuple[Any, Any]]:
    top, key = min(4, experts), mx.random.key(0)
    for tokens in (2, -(-LEAST_PAIRS * experts // top)):
        chosen = mx.argsort(mx.random.uniform(shape=(tokens, 1, experts), key=key), axis=-1)[..., :top]
        yield mx.random.normal((tokens, 1, columns), key=key), chosen
