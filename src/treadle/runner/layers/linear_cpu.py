"""Quantized linear layers on a CPU: makers of layers that dequantize their weights for several rows.

MLX multiplies quantized weights row by row on a CPU. Dequantized ones go through BLAS, which takes little longer for
many rows than for one. Layers stay quantized there only where memory is short (`loader`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from ..fused.quantization import Quantization
from .replace import Faster, Makers

_FEW, _MANY = 4, 32
"""Rows of timed products."""
_TRIES, _TELLING_S = 3, 0.1


class CpuLinearMakers:
    """Makers for quantized linear layers. How many rows a layer dequantizes its weights for is measured for each shape;
    `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._least: dict[Any, float] = {}

    @property
    def makers(self) -> Makers:
        return {"mlx.nn.layers.quantized.QuantizedLinear": self._quantized}

    def _quantized(self, layer: Any) -> Faster | None:
        way = Quantization.of(layer)
        kind = way, layer.weight.shape
        if kind not in self._least:
            self._least[kind] = self._least_rows(layer, way)
        least = self._least[kind]
        if least == math.inf:
            return None
        label = f"linear layers of {way} that are dequantized for {least:.0f} rows and more"
        call = DequantizingLinear(layer, way, int(least))
        return Faster({"__call__": call}, (kind, "bias" in layer), label, lambda: _examples(way.columns(layer.weight)))

    def _least_rows(self, layer: Any, way: Quantization) -> float:
        """The fewest rows for which dequantizing is faster; infinity where it takes more than half as long a row."""
        columns = way.columns(layer.weight)
        own = self._seconds(DequantizingLinear(layer, way, _MANY), _FEW, columns) / _FEW
        dequantizing = DequantizingLinear(layer, way, 0)
        one, many = (self._seconds(dequantizing, rows, columns) for rows in (1, _MANY))
        row = max(0.0, many - one) / (_MANY - 1)
        return max(2.0, math.ceil(one / (own - row))) if row < own / 2 else math.inf

    def _seconds(self, call: Callable[[Any], Any], rows: int, columns: int) -> float:
        """Seconds of a product, the best of a few tries that take no longer than they must."""
        x, tries = mx.ones((rows, columns)), [math.inf]
        for _ in range(_TRIES):
            if sum(tries[1:]) < _TELLING_S:
                began = self._clock()
                mx.eval(call(x))
                tries.append(self._clock() - began)
        return min(tries)


class DequantizingLinear:
    """A linear `layer` whose weights are dequantized for `least` rows and more."""

    def __init__(self, layer: Any, way: Quantization, least: int) -> None:
        self._parts = layer.weight, layer.scales, layer.get("biases")
        self._bias = layer.get("bias")
        self._way = way
        self._least = least

    def __call__(self, x: Any) -> Any:
        few = x.size // x.shape[-1] < self._least
        y = self._way.multiply(x, *self._parts) if few else x @ self._way.dequantize(*self._parts, x.dtype).T
        return y if self._bias is None else y + self._bias


def _examples(columns: int) -> Iterator[tuple[Any]]:
    for rows in (1, 70):
        yield (mx.random.normal((rows, 1, columns), key=mx.random.key(rows)),)
