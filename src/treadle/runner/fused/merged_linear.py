"""Merged linear layers: one matrix product for the weights of several layers, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...core.compute_path import KernelName, KernelState, KernelStatus
from ..device.cuda import NewKernel
from ..device.self_test import SelfTested, not_applicable
from . import skinny_gemm
from .dequantize import Dequantizer, dequantizer
from .packed_gemm import PackedGemm, packed_gemm
from .quantization import AFFINE, Quantization
from .skinny_gemm import SkinnyGemm
from .small_gemm import SmallGemm, small_gemm
from .workspace import LaunchOrder, Workspace

LIGHT = 120_000_000
"""The most bytes of a layer's weights with which an H200 waits for the host: that takes 75 us to start the layer's
products through cuBLASLt, and the device some 30 us for all but reading the weights."""
LIGHT_FOR_FEW, FEW_ROWS = 500_000_000, 8
"""The same for up to so many rows: the skinny kernel reads weights nearly as fast as cuBLASLt then, and where the host
is slow a step of an 8B model (390 MB a layer) waits for it."""
MANY_ROWS = 65
"""Rows from which on it pays to dequantize weights."""
MLX_ROWS = 8
"""Rows from which on MLX's quantized product on CUDA reads the weights once for all of them."""
_MLX_COLUMNS = 64
"""Columns of a tile of that product."""
LEAST_ROWS = 2
"""Rows from which on kernels of ours are used for weights that are not quantized: for one row, MLX's is the fastest."""
_HEAVY = "a layer's weights take longer to read than MLX's products take to start"
_NONE = "no weight of the model needs it"
_SHAPES = "no weight of the model has a shape and type that it takes"


@dataclass
class MergedLinear:
    """x W^T + b with W (N, K), quantized by `scales` and `biases` as `way` says, or not (None, 16 bits).

    Few rows go to `skinny`, many rows of quantized weights to `dequantizer`, dozens of others to `small`; where there
    is no such kernel, to MLX.
    """

    weight: Any
    scales: Any | None
    biases: Any | None
    bias: Any | None
    way: Quantization | None = None
    skinny: SkinnyGemm | PackedGemm | None = None
    small: SmallGemm | None = None
    dequantizer: Dequantizer | None = None

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: Any) -> Any:
        """(T, N) of `x` (T, K)."""
        skinny, least = self.skinny, LEAST_ROWS if self.way is None else 1
        if skinny is not None and least <= x.shape[0] <= skinny.most_rows:
            return skinny(x, self.bias) if self._adds(x) else self._with_bias(skinny(x))
        if self.way is not None:
            return self._quantized(x, self.way)
        if x.shape[0] < LEAST_ROWS:
            return _multiplied(x, self.weight, self.bias)
        return self._plain(x, self.weight)

    def _adds(self, x: Any) -> bool:
        """Whether kernels add the bias, if there is one."""
        return self.bias is None or bool(self.bias.dtype == x.dtype)

    def _with_bias(self, y: Any) -> Any:
        return y if self.bias is None else y + self.bias

    def _plain(self, x: Any, weight: Any) -> Any:
        if self.small is None or not self.small.pays(x.shape[0], weight):
            return _multiplied(x, weight, self.bias)
        return self.small(x, weight, self.bias) if self._adds(x) else self._with_bias(self.small(x, weight))

    def _quantized(self, x: Any, way: Quantization) -> Any:
        if self.dequantizer is None or x.shape[0] < MANY_ROWS:
            return self._with_bias(multiply_quantized(x, way, self.weight, self.scales, self.biases))
        x, weight = self.dequantizer(x, self.weight, self.scales, self.biases, way)
        return self.dequantizer.used(self._plain(x, weight))


def _multiplied(x: Any, weight: Any, bias: Any | None) -> Any:
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def multiply_quantized(x: Any, way: Quantization, weight: Any, scales: Any, biases: Any | None) -> Any:
    """x W^T by MLX for `x` (T, K) on CUDA, in the shape for which it is fastest.

    MLX reads the weights once for each row where there are fewer than eight, and once where there are eight, unless
    columns are too few for its tiles.
    """
    rows, columns = int(x.shape[0]), int(x.shape[1])
    if not 1 < rows < MLX_ROWS or columns % max(_MLX_COLUMNS, way.group):
        return way.multiply(x, weight, scales, biases)
    return way.multiply(mx.pad(x, [(0, MLX_ROWS - rows), (0, 0)]), weight, scales, biases)[:rows]


@dataclass(frozen=True)
class Tools:
    """Kernels that the products of one model share; `kernel` makes them, and they leave partial sums in `workspace`.
    Products that share inputs are launched in an `order`. `dtype` is the type of inputs, for weights that do not tell.

    `light` models have weights, not quantized, that are read in less time than the host takes to start MLX's products
    (18 us each through cuBLASLt on an H200, instead of 3): our kernels are used there. Of weights that are not
    quantized the skinny kernel takes up to `skinny_rows` rows (0: it is not used).
    """

    kernel: NewKernel
    workspace: Workspace
    light: bool = False
    skinny_rows: int = 0
    order: LaunchOrder | None = None
    dtype: Any | None = None
    _packed_ways: dict[Quantization, SelfTested[NewKernel]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kernel: NewKernel, layer_bytes: int, dtype: Any | None = None) -> Tools:
        """The tools for a model with `layer_bytes` bytes of weights a layer."""
        light, few = layer_bytes <= LIGHT, layer_bytes <= LIGHT_FOR_FEW
        rows = skinny_gemm.MOST_ROWS[16] if light else FEW_ROWS if few else 0
        return cls(kernel, Workspace(mx.float32), light, rows, dtype=dtype)

    @property
    def dequantizer(self) -> Dequantizer | None:
        """The dequantizer, self-tested at its first use; None where that failed."""
        return self._dequantizer.kernel

    @cached_property
    def _dequantizer(self) -> SelfTested[Dequantizer]:
        return dequantizer(self.kernel, self.order)

    @cached_property
    def _small_gemm(self) -> SelfTested[SmallGemm]:
        return small_gemm(self.kernel)

    def small(self, outputs: int, columns: int, dtype: Any) -> SmallGemm | None:
        """The kernel for dozens of rows of such a weight; None where it is not supported, or not worth while."""
        return self._small_gemm.kernel if self.light and SmallGemm.takes(outputs, columns, dtype) else None

    def skinny(
        self, weight: Any, *parts: Any, way: Quantization | None = None, dtype: Any = None
    ) -> SkinnyGemm | PackedGemm | None:
        """The kernel for few rows of a weight with its scales and biases; None where it is not supported, or not worth
        while. Quantized weights are multiplied with x of `dtype`."""
        if way is None and not self.skinny_rows:
            return None
        scales, biases = parts or (None, None)
        bits, group, mode = way or (16, 0, AFFINE)
        most = self.skinny_rows if way is None else None
        try:
            if mode == AFFINE:
                return SkinnyGemm(
                    weight,
                    scales,
                    biases,
                    bits,
                    group,
                    self.kernel,
                    workspace=self.workspace,
                    order=self.order,
                    most_rows=most,
                )
        except NotImplementedError:
            pass
        return None if way is None else self._packed(weight, scales, biases, way, dtype)

    def _packed(self, weight: Any, scales: Any, biases: Any, way: Quantization, dtype: Any) -> PackedGemm | None:
        try:
            product = PackedGemm(weight, scales, biases, way, dtype, self.kernel)
        except NotImplementedError:
            return None
        if way not in self._packed_ways:
            self._packed_ways[way] = packed_gemm(way, dtype, self.kernel)
        return product if self._packed_ways[way].kernel is not None else None

    def statuses(self, products: Sequence[MergedLinear]) -> list[KernelStatus]:
        """States of the kernels for matrix products, as the model's `products` use them."""
        skinny = KernelStatus(KernelName.SKINNY_GEMM, KernelState.ACTIVE)
        if not any(isinstance(product.skinny, SkinnyGemm) for product in products):
            skinny = not_applicable(KernelName.SKINNY_GEMM, _HEAVY if not self.skinny_rows else _SHAPES)
        return [skinny, self._packed_status(), self._small_gemm_status(), self._dequantizer_status(products)]

    def _packed_status(self) -> KernelStatus:
        found = [tested.status for tested in self._packed_ways.values()]
        failed = [status for status in found if status.state is KernelState.FAILED]
        return next(iter([*failed, *found]), not_applicable(KernelName.PACKED_GEMM, _NONE))

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
        plain, bias = concatenated(layers, "weight"), concatenated(layers, "bias")
        assert plain is not None
        return MergedLinear(plain, None, None, bias) if head else linear(plain, bias, tools)
    _check_kind(kinds)
    ways = {_way(layer) for layer in layers}
    if len(ways) > 1:
        raise NotImplementedError("linear layers that are quantized in different ways")
    way = Quantization.of(layers[0])
    weight, scales, biases, bias = (concatenated(layers, name) for name in ("weight", "scales", "biases", "bias"))
    return quantized_linear(weight, scales, biases, bias, way, tools, head=head)


def side_by_side(layers: Sequence[Any], tools: Tools) -> list[MergedLinear]:
    """Products of layers that share their input: neighbors of one kind in one. Raises NotImplementedError for layers of
    unknown kinds."""
    for layer in layers:
        _check_kind({type(layer)})
    groups: list[list[Any]] = []
    for layer in layers:
        if groups and _way(groups[-1][-1]) == _way(layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return [merge_linears(group, tools) for group in groups]


def _way(layer: Any) -> Quantization | None:
    return Quantization.of(layer) if type(layer) is nn.QuantizedLinear else None


def _check_kind(kinds: set[type]) -> None:
    if not kinds <= {nn.Linear, nn.QuantizedLinear}:
        raise NotImplementedError(f"linear layers of {', '.join(kind.__name__ for kind in kinds)}")


def linear(weight: Any, bias: Any | None, tools: Tools) -> MergedLinear:
    """The product for a weight (N, K) of 16 bits."""
    small = tools.small(weight.shape[0], weight.shape[1], weight.dtype)
    return MergedLinear(weight, None, None, bias, skinny=tools.skinny(weight), small=small)


def quantized_linear(
    weight: Any,
    scales: Any,
    biases: Any | None,
    bias: Any | None,
    way: Quantization,
    tools: Tools,
    *,
    head: bool = False,
) -> MergedLinear:
    """The product for a quantized weight. A `head` is not dequantized for many rows."""
    dtype = scales.dtype if way.mode == AFFINE else tools.dtype
    skinny = tools.skinny(weight, scales, biases, way=way, dtype=dtype)
    dequantizer = None if head else tools.dequantizer
    if dequantizer is None or not dequantizer.takes(weight, way, dtype):
        return MergedLinear(weight, scales, biases, bias, way, skinny)
    small = tools.small(weight.shape[0], way.columns(weight), dtype)
    return MergedLinear(weight, scales, biases, bias, way, skinny, small, dequantizer)


def concatenated(layers: Sequence[Any], name: str) -> Any | None:
    """Concatenate the layers' arrays of that name along their first axis; None where they have none. A bias that a
    layer has not is zeros."""
    found = [layer.get(name) for layer in layers]
    if all(array is None for array in found):
        return None
    if len(found) == 1:
        return found[0]
    dtype = next(array.dtype for array in found if array is not None)
    sizes = [layer.weight.shape[0] for layer in layers]
    whole = mx.concatenate([mx.zeros(n, dtype) if one is None else one for n, one in zip(sizes, found, strict=True)])
    mx.eval(whole)
    start = 0
    for layer, size, array in zip(layers, sizes, found, strict=True):
        end = start + size
        if array is not None:
            part = whole[start:end]
            mx.eval(part)
            setattr(layer, name, part)
        start = end
    return whole
