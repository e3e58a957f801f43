"""Matrix products with the weights of one or several of a model's linear layers, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cuda import NewKernel
from .few_rows import FewRows


@dataclass
class Product:
    """x W^T + b with W (N, K) plain, or quantized by `scales` and `biases` to `bits` in groups of `group`;
    few rows with quantized weights by a kernel that `kernel` makes. Plain weights MLX reads near the memory's speed."""

    kernel: NewKernel
    weight: Any
    scales: Any | None
    biases: Any | None
    bias: Any | None
    bits: int = 0
    group: int = 0

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    @cached_property
    def _few(self) -> FewRows | None:
        if self.scales is None:
            return None
        try:
            return FewRows(self.weight, self.scales, self.biases, self.bits, self.group, self.kernel)
        except NotImplementedError:
            return None

    def __call__(self, x: Any) -> Any:
        """(T, N) of `x` (T, K)."""
        if self.scales is None:
            return x @ self.weight.T if self.bias is None else mx.addmm(self.bias, x, self.weight.T)
        few = self._few
        if few is not None and x.shape[0] <= few.most_rows:
            y = few(x)
        else:
            y = mx.quantized_matmul(
                x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group, bits=self.bits
            )
        return y if self.bias is None else y + self.bias


def joined(layers: Sequence[Any], kernel: NewKernel) -> Product:
    """The layers' weights in one product; the layers keep views of it. Raises NotImplementedError where they differ in
    kind."""
    kinds = {type(layer) for layer in layers}
    if kinds == {nn.Linear}:
        return Product(kernel, _side_by_side(layers, "weight"), None, None, _side_by_side(layers, "bias"))
    if kinds != {nn.QuantizedLinear}:
        raise NotImplementedError(f"linear layers of {', '.join(kind.__name__ for kind in kinds)}")
    ways = {(layer.bits, layer.group_size, getattr(layer, "mode", "affine")) for layer in layers}
    if len(ways) > 1:
        raise NotImplementedError("linear layers that are quantized in different ways")
    ((bits, group, mode),) = ways
    if mode != "affine":
        raise NotImplementedError(f"weights quantized as {mode}")
    return Product(
        kernel,
        _side_by_side(layers, "weight"),
        _side_by_side(layers, "scales"),
        _side_by_side(layers, "biases"),
        _side_by_side(layers, "bias"),
        bits,
        group,
    )


def _side_by_side(layers: Sequence[Any], name: str) -> Any | None:
    """The layers' arrays of that name as one, along their first axis; None where they have none."""
    arrays = [layer[name] for layer in layers if name in layer]
    if not arrays:
        return None
    if len(arrays) < len(layers):
        raise NotImplementedError(f"only some of the layers have a {name}")
    if len(arrays) == 1:
        return arrays[0]
    whole = mx.concatenate(arrays)
    mx.eval(whole)
    start = 0
    for layer, array in zip(layers, arrays, strict=True):
        part = whole[start : start + array.shape[0]]
        mx.eval(part)
        setattr(layer, name, part)
        start += array.shape[0]
    return whole
