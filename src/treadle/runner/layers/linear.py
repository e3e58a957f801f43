"""Linear layers of any model on CUDA, quantized or not: makers of faster ones.

A decode batch reaches a layer as (T, 1, K), a ragged one as well. MLX's quantized product reads the weights once for
each of these rows, so rows are laid side by side as (T, K), and few of them go to kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...core.compute_path import KernelStatus
from ..device.cuda import CudaKernel, NewKernel
from ..fused.head_product import multiply_by_heads
from ..fused.merged_linear import LIGHT, MANY_ROWS, MergedLinear, Tools, linear, multiply_quantized, quantized_linear
from ..fused.quantization import AFFINE, Quantization
from ..fused.workspace import LaunchOrder
from .replace import Faster, Makers, full_name

_LINEAR = "mlx.nn.layers.linear.Linear"
_QUANTIZED = "mlx.nn.layers.quantized.QuantizedLinear"
_EMBEDDING = "mlx.nn.layers.quantized.QuantizedEmbedding"
_MULTI = "mlx_lm.models.mla.MultiLinear"
_QUANTIZED_MULTI = "mlx_lm.models.mla.QuantizedMultiLinear"
_PRODUCTS_A_LAYER = 4
"""Products of a fused layer, for which `LIGHT` was measured."""
_TYPES = (mx.bfloat16, mx.float16)
_TESTED_ROWS = (1, 3, 9, 20, 40, MANY_ROWS)
"""Rows of a self-test: each kernel, and MLX's product in each shape."""


class LinearMakers:
    """Makers for the linear layers of `module`, with `kernel` as their kernels, or MLX's products alone (None)."""

    def __init__(self, module: Any, kernel: NewKernel | None = CudaKernel) -> None:
        self._module = module
        self._kernel = kernel
        self._tools: dict[Any, Tools] = {}
        self.products: list[MergedLinear] = []

    @property
    def makers(self) -> Makers:
        found: Makers = {
            _QUANTIZED: self._quantized,
            _EMBEDDING: self._head,
            _MULTI: self._multi,
            _QUANTIZED_MULTI: self._multi,
        }
        return found if self._kernel is None else {**found, _LINEAR: self._linear}

    @property
    def orders(self) -> list[LaunchOrder]:
        """The orders of launches, one for each type of numbers. A traced pass restarts them at both ends."""
        return [tools.order for tools in self._tools.values() if tools.order is not None]

    def reset(self) -> None:
        """Forget the products that were made, and the kernels and the memory that they share."""
        self._tools.clear()
        self.products.clear()

    def statuses(self) -> list[KernelStatus]:
        """States of the kernels for matrix products, as the layers use them."""
        some = [tools.statuses(self.products) for tools in self._tools.values()]
        return some[0] if some else []

    def _linear(self, layer: Any) -> Faster | None:
        weight = layer.weight
        tools = self.tools_for(weight.dtype)
        if tools is None or weight.shape[0] in self._vocabularies:
            return None
        product = linear(weight, layer.get("bias"), tools)
        if product.skinny is None and product.small is None:
            return None
        return self._faster(product, weight.dtype, "__call__", weight.shape[1], "linear layers")

    def _quantized(self, layer: Any) -> Faster:
        return self._made(layer, "__call__", layer.get("bias"), "quantized linear layers")

    def _head(self, layer: Any) -> Faster:
        """An embedding as the output head."""
        return self._made(layer, "as_linear", None, "the quantized output head")

    def _made(self, layer: Any, method: str, bias: Any | None, label: str) -> Faster:
        way = Quantization.of(layer)
        parts = layer.weight, layer.scales, layer.get("biases")
        dtype = layer.scales.dtype if way.mode == AFFINE else self.dtype
        tools = self.tools_for(dtype)
        if tools is None:
            product = MergedLinear(*parts, bias, way)
        else:
            head = layer.weight.shape[0] in self._vocabularies
            product = quantized_linear(*parts, bias, way, tools, head=head)
        return self._faster(product, dtype, method, way.columns(layer.weight), f"{label} of {way}")

    def _faster(self, product: MergedLinear, dtype: Any, method: str, columns: int, label: str) -> Faster:
        self.products.append(product)
        kind = label, method, product.weight.shape, product.bias is None, dtype
        flat = FlatLinear(product, dtype, columns)
        return Faster({method: flat}, kind, label, lambda: _examples(columns, dtype))

    def _multi(self, layer: Any) -> Faster:
        way = Quantization.of(layer) if "scales" in layer else None
        inputs = layer.weight.shape[-1] if way is None else way.columns(layer.weight)
        dtype = layer.weight.dtype if way is None else layer.scales.dtype if way.mode == AFFINE else self.dtype
        heads, outputs = layer.weight.shape[:2]
        label = "linear layers of each head"

        def examples() -> Iterator[tuple[Any, ...]]:
            for rows, count in ((1, 1), (3, 1), (9, 1), (2, 5)):
                for transpose, columns in ((True, inputs), (False, outputs)):
                    x = mx.random.normal((rows, heads, count, columns), key=mx.random.key(rows))
                    yield x.astype(dtype), transpose

        call = HeadLinear(layer.weight, layer.get("scales"), layer.get("biases"), way)
        return Faster({"__call__": call}, (label, layer.weight.shape, way, dtype), label, examples)

    def tools_for(self, dtype: Any) -> Tools | None:
        """The tools for inputs of `dtype`; None where there are no kernels for it."""
        if self._kernel is None or dtype not in _TYPES:
            return None
        if dtype not in self._tools:
            made = Tools.of(self._kernel, self._layer_bytes, dtype)
            self._tools[dtype] = replace(made, order=LaunchOrder(dtype))
        return self._tools[dtype]

    @cached_property
    def _vocabularies(self) -> set[int]:
        """Rows of the model's embeddings. A head has as many outputs: it is too large to be dequantized as a whole, and
        takes longer to read than MLX's product takes to start."""
        embeddings = [one for one in self._module.modules() if full_name(type(one)).endswith("Embedding")]
        return {int(one.weight.shape[0]) for one in embeddings}

    @cached_property
    def _layer_bytes(self) -> int:
        """Mean bytes of as many products as a fused layer has."""
        some = [
            one for one in self._module.modules() if "weight" in one and full_name(type(one)) in (_LINEAR, _QUANTIZED)
        ]
        sizes = [sum(array.nbytes for _, array in tree_flatten(one.parameters())) for one in some]
        return _PRODUCTS_A_LAYER * sum(sizes) // max(1, len(sizes)) if sizes else LIGHT + 1

    @cached_property
    def dtype(self) -> Any:
        """The type that the model computes in: that of most of its parameters, packed ones aside."""
        sizes: dict[Any, int] = {}
        for _, array in tree_flatten(self._module.parameters()):
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[array.dtype] = sizes.get(array.dtype, 0) + int(array.size)
        return max(sizes, key=lambda dtype: sizes[dtype], default=mx.float32)


class FlatLinear:
    """`product` for x (..., K) with all rows side by side. Its kernels compute in `dtype`; x of another type goes to
    MLX."""

    def __init__(self, product: MergedLinear, dtype: Any, columns: int) -> None:
        self._product = product
        self._dtype = dtype
        self._columns = columns

    def __call__(self, x: Any) -> Any:
        flat = x.reshape(-1, self._columns)
        y = self._product(flat) if x.dtype == self._dtype else self._of_another_type(flat)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _of_another_type(self, x: Any) -> Any:
        product = self._product
        bias, way = product.bias, product.way
        if way is None:
            return x @ product.weight.T if bias is None else mx.addmm(bias, x, product.weight.T)
        y = multiply_quantized(x, way, product.weight, product.scales, product.biases)
        return y if bias is None else y + bias


class HeadLinear:
    """A linear layer with a weight for each head, for x (B, heads, L, K). Where L is 1, the tokens of a head are laid
    side by side: else MLX reads the head's weight once for each."""

    def __init__(self, weight: Any, scales: Any | None, biases: Any | None, way: Quantization | None) -> None:
        self._parts = weight, scales, biases
        self._way = way

    def __call__(self, x: Any, transpose: bool = True) -> Any:
        if x.ndim != 4 or x.shape[2] != 1 or x.shape[0] == 1:
            return self._multiply(x, transpose)
        return self._multiply(x[:, :, 0].swapaxes(0, 1), transpose).swapaxes(0, 1)[:, :, None]

    def _multiply(self, x: Any, transpose: bool) -> Any:
        return multiply_by_heads(x, *self._parts, self._way, transpose=transpose)


def _examples(columns: int, dtype: Any) -> Iterator[tuple[Any]]:
    for rows in _TESTED_ROWS:
        yield (mx.random.normal((rows, 1, columns), key=mx.random.key(rows)).astype(dtype),)
