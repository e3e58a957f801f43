"""Matrix products with the weights of one or several of a model's linear layers, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device.cuda import NewKernel
from .dequantize import Dequantizer, dequantizer
from .skinny_gemm import SkinnyGemm
from .small_gemm import SmallGemm, small_gemm
from .workspace import Workspace

LIGHT = 120_000_000
"""Bytes of a layer's weights. The host takes 75 us to start its products through cuBLASLt, and all else that a layer is
takes an H200 some 30 us, so that it waits for the host where it reads the weights in less than the difference."""
MANY_ROWS = 65
"""Rows from which on it pays to make quantized weights plain."""
LEAST_ROWS = 2
"""For one row of x MLX's own kernel for plain weights is the fastest."""


@dataclass
class MergedLinear:
    """x W^T + b with W (N, K) plain, or quantized by `scales` and `biases` to `bits` in groups of `group`: few rows by
    `few`, many rows with weights that `dequantizer` made plain, where there are such. With plain ones by `some` as
    long as that pays."""

    weight: Any
    scales: Any | None
    biases: Any | None
    bias: Any | None
    bits: int = 16
    group: int = 0
    few: SkinnyGemm | None = None
    some: SmallGemm | None = None
    dequantizer: Dequantizer | None = None

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: Any) -> Any:
        """(T, N) of `x` (T, K)."""
        few, least = self.few, LEAST_ROWS if self.scales is None else 1
        if few is not None and least <= x.shape[0] <= few.most_rows:
            y = few(x)
        elif self.scales is not None:
            y = self._quantized(x)
        elif self.some is not None and x.shape[0] >= LEAST_ROWS and self.some.pays(x.shape[0], self.weight):
            y = self.some(x, self.weight)
        else:
            return x @ self.weight.T if self.bias is None else mx.addmm(self.bias, x, self.weight.T)
        return y if self.bias is None else y + self.bias

    def _quantized(self, x: Any) -> Any:
        if self.dequantizer is None or x.shape[0] < MANY_ROWS:
            parts = self.weight, self.scales, self.biases
            return mx.quantized_matmul(x, *parts, transpose=True, group_size=self.group, bits=self.bits)  # type: ignore[arg-type]
        x, weight = self.dequantizer(x, self.weight, self.scales, self.biases, self.bits, self.group)
        if self.some is not None and self.some.pays(x.shape[0], weight):
            return self.some(x, weight)
        return x @ weight.T


@dataclass(frozen=True)
class Tools:
    """What products of one model share: `kernel` makes their kernels, which leave their sums in `scratch`. `light`
    models have plain weights that are read in less time than the host takes to start MLX's products (18 us each
    through cuBLASLt, H200, instead of 3): rows that are not many go to kernels there."""

    kernel: NewKernel
    scratch: Workspace
    light: bool = False

    @classmethod
    def of(cls, kernel: NewKernel, layer_bytes: int) -> Tools:
        """For a model whose layers' weights are so many bytes each."""
        return cls(kernel, Workspace(mx.float32), layer_bytes <= LIGHT)

    @cached_property
    def dequantizer(self) -> Dequantizer | None:
        """What makes quantized weights plain; tried where there are such."""
        return dequantizer(self.kernel)

    @cached_property
    def _some(self) -> SmallGemm | None:
        return small_gemm(self.kernel)

    def some(self, outputs: int, columns: int, dtype: Any) -> SmallGemm | None:
        """The kernel for some rows of a plain weight; None where it does not fit, or is not worth while."""
        return self._some if self.light and SmallGemm.takes(outputs, columns, dtype) else None

    def few(self, weight: Any, *parts: Any, bits: int = 16, group: int = 0) -> SkinnyGemm | None:
        """The kernel for few rows of a weight, and its scales and biases; None where it does not fit them, or is not
        worth while."""
        if not parts and not self.light:
            return None
        scales, biases = parts or (None, None)
        try:
            return SkinnyGemm(weight, scales, biases, bits, group, self.kernel, scratch=self.scratch)
        except NotImplementedError:
            return None


def merge_linears(layers: Sequence[Any], tools: Tools, *, head: bool = False) -> MergedLinear:
    """The layers' weights in one product; the layers keep views of it. A `head` is one large product for few rows.
    Raises NotImplementedError where they differ in kind."""
    kinds = {type(layer) for layer in layers}
    if kinds == {nn.Linear}:
        plain, bias = _side_by_side(layers, "weight"), _side_by_side(layers, "bias")
        assert plain is not None
        if head:
            return MergedLinear(plain, None, None, bias)
        return MergedLinear(
            plain, None, None, bias, few=tools.few(plain), some=tools.some(plain.shape[0], plain.shape[1], plain.dtype)
        )
    if kinds != {nn.QuantizedLinear}:
        raise NotImplementedError(f"linear layers of {', '.join(kind.__name__ for kind in kinds)}")
    ways = {(layer.bits, layer.group_size, getattr(layer, "mode", "affine")) for layer in layers}
    if len(ways) > 1:
        raise NotImplementedError("linear layers that are quantized in different ways")
    ((bits, group, mode),) = ways
    if mode != "affine":
        raise NotImplementedError(f"weights quantized as {mode}")
    weight, scales, biases, bias = (_side_by_side(layers, name) for name in ("weight", "scales", "biases", "bias"))
    assert weight is not None
    assert scales is not None
    few = tools.few(weight, scales, biases, bits=bits, group=group)
    plainer = None if head else tools.dequantizer
    if plainer is None or not plainer.takes(weight, scales, bits):
        return MergedLinear(weight, scales, biases, bias, bits, group, few)
    some = tools.some(weight.shape[0], weight.shape[1] * 32 // bits, scales.dtype)
    return MergedLinear(weight, scales, biases, bias, bits, group, few, some, plainer)


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
