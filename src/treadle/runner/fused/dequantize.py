"""Dequantization of weights on CUDA, for products of many rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core.compute_path import KernelName
from ..device.cuda import CudaKernel, NewKernel
from ..device.self_test import SelfTested, self_tested
from .quantization import WIDTHS, Quantization
from .workspace import LaunchOrder, Workspace

_THREADS = 256
_FILES = ("device/numbers.cuh", "fused/quantized.cuh")
_BODY = """
  constexpr int PER = 8;  // weights, in BITS bytes
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t rest = size_t(x_shape[0]) * x_shape[1] / PER;
  if (i < rest) reinterpret_cast<uint4*>(same)[i] = reinterpret_cast<const uint4*>(x)[i];
  if (i >= size_t(w_shape[0]) * w_shape[1] * 4 / BITS) return;
  const float scale = treadle::factor<MODE>(s[i * PER / GROUP]);
  const float bias = MODE == 0 ? treadle::wide(reinterpret_cast<const T*>(b)[i * PER / GROUP]) : 0.0f;
  alignas(8) unsigned char bytes[BITS];
  if constexpr (BITS == 4) *reinterpret_cast<unsigned*>(bytes) = w[i];
  else if constexpr (BITS == 8) *reinterpret_cast<uint2*>(bytes) = reinterpret_cast<const uint2*>(w)[i];
  else for (int k = 0; k < BITS; ++k) bytes[k] = reinterpret_cast<const unsigned char*>(w)[i * BITS + k];
  uint4 eight;
  T* to = reinterpret_cast<T*>(&eight);
  for (int e = 0; e < PER; ++e)
    to[e] = treadle::narrow(scale * treadle::stored<MODE>(treadle::nth<BITS>(bytes, e)) + bias, T());
  reinterpret_cast<uint4*>(const_cast<T*>(plain))[i] = eight;
"""


class Dequantizer:
    """Dequantizes weights into memory that all products use in turn, in the given `order` where they share inputs.

    MLX's own product of many rows with quantized weights takes three to five times as long as dequantizing and
    multiplying. Arrays of a pass are not freed before it ends, so with an array for each product the whole model would
    come to be held dequantized.
    """

    def __init__(self, kernel: NewKernel = CudaKernel, order: LaunchOrder | None = None) -> None:
        inputs = ["x", "w", "s", "b", "plain", *(() if order is None else ("after",))]
        self._kernel = kernel("dequantize", inputs, ["same"], _BODY, files=_FILES)
        self._memory: Workspace | None = None
        self._order = order

    def takes(self, weight: Any, way: Quantization, dtype: Any | None) -> bool:
        """Whether such weights are supported for `x` of `dtype`; reserves memory for them then. Ask before the first
        call."""
        known = dtype is not None and dtype in (mx.bfloat16, mx.float16)
        if not known or way.bits not in WIDTHS or way.columns(weight) % 8:
            return False
        if self._memory is None:
            self._memory = Workspace(dtype)
        if self._memory.dtype == dtype:
            self._memory.reserve(int(weight.size) * 32 // way.bits)
        return bool(self._memory.dtype == dtype)

    def __call__(self, x: Any, weight: Any, scales: Any, biases: Any | None, way: Quantization) -> tuple[Any, Any]:
        """`x` (T, K) again, and W (N, K) in its type. W is valid once the returned `x` is, until the next call."""
        outputs, columns = int(weight.shape[0]), way.columns(weight)
        assert self._memory is not None, "weights that `takes` was not asked about"
        plain = self._memory.array(outputs, columns)
        threads = max(outputs, x.shape[0]) * columns // 8
        after = () if self._order is None else (self._order.last,)
        (same,) = self._kernel(
            [x, weight, scales, scales if biases is None else biases, plain, *after],
            [("T", x.dtype), ("BITS", way.bits), ("GROUP", way.group), ("MODE", way.number)],
            blocks=(-(-threads // _THREADS), 1),
            threads=_THREADS,
            shapes=[x.shape],
            dtypes=[x.dtype],
        )
        return same, plain

    def used(self, y: Any) -> Any:
        """`y`, which was computed with the last W: the next launch comes after it."""
        if self._order is not None:
            self._order.last = y
        return y


def dequantizer(kernel: NewKernel = CudaKernel, order: LaunchOrder | None = None) -> SelfTested[Dequantizer]:
    """The kernel with the outcome of its self-test."""
    return self_tested(
        KernelName.DEQUANTIZE,
        lambda: Dequantizer(kernel, order),
        lambda _: _why_not(kernel),
        instead="MLX multiplies many rows with quantized weights (three to five times as long)",
    )


def _why_not(kernel: NewKernel) -> str:
    """Return what is wrong with dequantized weights; empty if nothing is. Each width is tested on a kernel of its own,
    as one takes its memory once."""
    wrong = [bits for bits in (4, 8) if not _is_right(Dequantizer(kernel), Quantization(bits, 64))]
    return f"weights of {wrong[0]} bits are not what they should be" if wrong else ""


def _is_right(made: Dequantizer, way: Quantization) -> bool:
    numbers = np.random.default_rng(way.bits).normal(0, 1, (72, 128)).astype(np.float16)
    x, (weight, scales, biases) = mx.array(numbers[:70]), way.quantize(mx.array(numbers))
    made.takes(weight, way, x.dtype)
    same, plain = made(x, weight, scales, biases, way)
    mx.eval(same)
    wanted = way.dequantize(weight, scales, biases)
    close = mx.allclose(plain.astype(mx.float32), wanted.astype(mx.float32), rtol=0, atol=0.01)
    return bool(mx.array_equal(same, x).item() and close.item())
