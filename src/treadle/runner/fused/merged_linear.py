"""Merged linear layers: one matrix product for the weights of several layers, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...core.compute_path import KernelName, KernelState, KernelStatus
from ..device.cuda import NewKernel
from ..device.self_test import SelfTested, not_applicable
from .dequantize import Dequantizer, dequantizer
from .skinny_gemm import SkinnyGemm
from .small_gemm import SmallGemm, small_gemm
from .workspace import Workspace

LIGHT = 120_000_000
"""The most bytes of a layer's weights with which an H200 waits for the host: that takes 75 us to start the layer's
products through cuBLASLt, and the device some 30 us for all but reading the weights."""
MANY_ROWS = 65
"""Rows from which on it pays to dequantize weights."""
LEAST_ROWS = 2
"""Rows from which on kernels of ours are used for weights that are not quantized: for one row, MLX's is the fastest."""
_HEAVY = "a layer's weights take longer to read than MLX's products take to start"
_SHAPES = "no weight of the model has a shape and type that it takes"


@dataclass
class MergedLinear:
    """x W^T + b with W (N, K), quantized by `scales` and `biases` to `bits` in groups of `group`, or not (None, 16
    bits).

    Few rows go to `skinny`, many rows of quantized weights to `dequantizer`, dozens of others to `small`; where there
    is no such kernel, to MLX.
    """

    weight: Any
    scales: Any | None
    biases: Any | None
    bias: Any | None
    bits: int = 16
    group: int = 0
    skinny: SkinnyGemm | None = None
    small: SmallGemm | None = None
    dequantizer: Dequantizer | None = None

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: Any) -> Any:
        """(T, N) of `x` (T, K)."""
        skinny, least = self.skinny, LEAST_ROWS if self.scales is None else 1
        if skinny is not None and least <= x.shape[0] <= skinny.most_rows:
            y = skinny(x)
        elif self.scales is not None:
            y = self._quantized(x)
        elif self.small is not None and x.shape[0] >= LEAST_ROWS and self.small.pays(x.shape[0], self.weight):
            y = self.small(x, self.weight)
        else:
            return x @ self.weight.T if self.bias is None else mx.addmm(self.bias, x, self.weight.T)
        return y if self.bias is None else y + self.bias

    def _quantized(self, x: Any) -> Any:
        if self.dequantizer is None or x.shape[0] < MANY_ROWS:
            parts = self.weight, self.scales, self.biases
            return mx.quantized_matmul(x, *parts, transpose=True, group_size=self.group, bits=self.bits)  # type: ignore[arg-type]
        x, weight = self.dequantizer(x, self.weight, self.scales, self.biases, self.bits, self.group)
        if self.small is not None and self.small.pays(x.shape[0], weight):
            return self.small(x, weight)
        return x @ weight.T


@dataclass(frozen=True)
class Tools:
    """Kernels that the products of one model share; `kernel` makes them, and they leave partial sums in `workspace`.

    `light` models have weights, not quantized, that are read in less time than the host takes to start MLX's products
    (18 us each through cuBLASLt on an H200, instead of 3): our kernels are used there.
    """

    kernel: NewKernel
    workspace: Workspace
    light: bool = False

    @classmethod
    def of(cls, kernel: NewKernel, layer_bytes: int) -> Tools:
        """The tools for a model with `layer_bytes` bytes of weights a layer."""
        return cls(kernel, Workspace(mx.float32), layer_bytes <= LIGHT)

    @property
    def dequantizer(self) -> Dequantizer | None:
        """The dequantizer, self-tested at its first use; None where that failed."""
        return self._dequantizer.kernel

    @cached_property
    def _dequantizer(self) -> SelfTested[Dequantizer]:
        return dequantizer(self.kernel)

    @cached_property
    def _small_gemm(self) -> SelfTested[SmallGemm]:
        return small_gemm(self.kernel)

    def small(self, outputs: int, columns: int, dtype: Any) -> SmallGemm | None:
        """The kernel for dozens of rows of such a weight; None where it is not supported, or not worth while."""
        return self._small_gemm.kernel if self.light and SmallGemm.takes(outputs, columns, dtype) else None

    def skinny(self, weight: Any, *parts: Any, bits: int = 16, group: int = 0) -> SkinnyGemm | None:
        """The kernel for few rows of a weight with its scales and biases; None where it is not supported, or not worth
        while."""
        if not parts and not self.light:
            return None
        scales, biases = parts or (None, None)
        try:
            return SkinnyGemm(weight, scales, biases, bits, group, self.kernel, workspace=self.workspace)
        except NotImplementedError:
            return None

    def statuses(self, products: Sequence[MergedLinear]) -> list[KernelStatus]:
        """States of the kernels for matrix products, as the model's `products` use them."""
        skinny = KernelStatus(KernelName.SKINNY_GEMM, KernelState.ACTIVE)
        if all(product.skinny is None for product in products):
            skinny = not_applicable(KernelName.SKINNY_GEMM, _HEAVY if not self.light else _SHAPES)
        return [skinny, self._small_gemm_status(), self._dequantizer_status(products)]

    def _small_gemm_status(self) -> KernelStatus:
        if "_small_gemm" in self.__dict__:
            return self._small_gemm.status
        return not_applicable(KernelName.SMALL_GEMM, _HEAVY if not self.light else _SHAPES)

    def _dequantizer_status(self, products: Sequence[MergedLinear]) -> KernelStatus:
        if "_dequantizer" in self.__dict__:
            return self._dequantizer.status
        return not_applicable(KernelName.DEQUANTIZE, "the weights are not quantized")


def merge_linears(layers: Sequence[Any], tools: Tools, *, head: bool = False) -> MergedLinear:
    """The layers' weights in one product; the layers keep views of it. A `head` is one large product for skinny rows.
    Raises NotImplementedError where they differ in kind."""
    kinds = {type(layer) for layer in layers}
    if kinds == {nn.Linear}:
        plain, bias = _concatenated(layers, "weight"), _concatenated(layers, "bias")
        assert plain is not None
        if head:
            return MergedLinear(plain, None, None, bias)
        return MergedLinear(
            plain,
            None,
            None,
            bias,
            skinny=tools.skinny(plain),
            small=tools.small(plain.shape[0], plain.shape[1], plain.dtype),
        )
    if kinds != {nn.QuantizedLinear}:
        raise NotImplementedError(f"linear layers of {', '.join(kind.__name__ for kind in kinds)}")
    ways = {(layer.bits, layer.group_size, getattr(layer, "mode", "affine")) for layer in layers}
    if len(ways) > 1:
        raise NotImplementedError("linear layers that are quantized in different ways")
    ((bits, group, mode),) = ways
    if mode != "affine":
        raise NotImplementedError(f"weights quantized as {mode}")
    weight, scales, biases, bias = (_concatenated(layers, name) for name in ("weight", "scales", "biases", "bias"))
    assert weight is not None
    assert scales is not None
    skinny = tools.skinny(weight, scales, biases, bits=bits, group=group)
    dequantizer = None if head else tools.dequantizer
    if dequantizer is None or not dequantizer.takes(weight, scales, bits):
        return MergedLinear(weight, scales, biases, bias, bits, group, skinny)
    small = tools.small(weight.shape[0], weight.shape[1] * 32 // bits, scales.dtype)
    return MergedLinear(weight, scales, biases, bias, bits, group, skinny, small, dequantizer)


def _concatenated(layers: Sequence[Any], name: str) -> Any | None:
    """Concatenate the layers' arrays of that name along their first axis; None where they have none."""
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
