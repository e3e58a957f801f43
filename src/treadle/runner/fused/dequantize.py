"""Dequantization of weights on CUDA, for products of many rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core.compute_path import KernelName
from ..device.cuda import CudaKernel, NewKernel
from ..device.self_test import SelfTested, self_tested
from .workspace import Workspace

_THREADS = 256
_BITS = (4, 8)
_BODY = """
  constexpr int PER = 8, WORDS = BITS / 4;  // of 32 bits, for eight weights
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t rest = size_t(x_shape[0]) * x_shape[1] / PER;
  if (i < rest) reinterpret_cast<uint4*>(same)[i] = reinterpret_cast<const uint4*>(x)[i];
  if (i >= size_t(w_shape[0]) * w_shape[1] / WORDS) return;
  const float scale = treadle::wide(s[i * PER / GROUP]), bias = treadle::wide(b[i * PER / GROUP]);
  unsigned word[WORDS];
  for (int k = 0; k < WORDS; ++k) word[k] = w[i * WORDS + k];
  uint4 eight;
  T* to = reinterpret_cast<T*>(&eight);
  for (int e = 0; e < PER; ++e) {
    const unsigned q = word[e * BITS / 32] >> (e * BITS % 32) & ((1u << BITS) - 1);
    to[e] = treadle::narrow(scale * q + bias, T());
  }
  reinterpret_cast<uint4*>(const_cast<T*>(plain))[i] = eight;
"""


class Dequantizer:
    """Dequantizes weights into memory that all products use in turn.

    MLX's own product of many rows with quantized weights takes three to five times as long as dequantizing and
    multiplying. Arrays of a pass are not freed before it ends, so with an array for each product the whole model would
    come to be held dequantized.
    """

    def __init__(self, kernel: NewKernel = CudaKernel) -> None:
        self._kernel = kernel(
            "dequantize", ["x", "w", "s", "b", "plain"], ["same"], _BODY, files=["device/numbers.cuh"]
        )
        self._memory: Workspace | None = None

    def takes(self, weight: Any, scales: Any, bits: int) -> bool:
        """Whether such weights are supported; reserves memory for them then. Ask before the first call."""
        if bits not in _BITS or scales.dtype not in (mx.bfloat16, mx.float16):
            return False
        if self._memory is None:
            self._memory = Workspace(scales.dtype)
        self._memory.reserve(int(weight.size) * 32 // bits)
        return bool(self._memory.dtype == scales.dtype)

    def __call__(self, x: Any, weight: Any, scales: Any, biases: Any, bits: int, group: int) -> tuple[Any, Any]:
        """`x` (T, K) again, and W (N, K) in its type. W is valid once the returned `x` is, until the next call."""
        outputs, columns = int(weight.shape[0]), int(weight.shape[1]) * 32 // bits
        assert self._memory is not None, "weights that `takes` was not asked about"
        plain = self._memory.array(outputs, columns)
        threads = max(outputs, x.shape[0]) * columns // 8
        (same,) = self._kernel(
            [x, weight, scales, biases, plain],
            [("T", x.dtype), ("BITS", bits), ("GROUP", group)],
            blocks=(-(-threads // _THREADS), 1),
            threads=_THREADS,
            shapes=[x.shape],
            dtypes=[x.dtype],
        )
        return same, plain


def dequantizer(kernel: NewKernel = CudaKernel) -> SelfTested[Dequantizer]:
    """The kernel with the outcome of its self-test."""
    return self_tested(
        KernelName.DEQUANTIZE,
        lambda: Dequantizer(kernel),
        lambda _: _why_not(kernel),
        instead="MLX multiplies many rows with quantized weights (three to five times as long)",
    )


def _why_not(kernel: NewKernel) -> str:
    """Return what is wrong with dequantized weights; empty if nothing is. Each width is tested on a kernel of its own,
    as one takes its memory once."""
    wrong = [bits for bits in _BITS if not _is_right(Dequantizer(kernel), bits)]
    return f"weights of {wrong[0]} bits are not what they should be" if wrong else ""


def _is_right(made: Dequantizer, bits: int) -> bool:
    numbers = np.random.default_rng(bits).normal(0, 1, (72, 128)).astype(np.float16)
    x, parts = mx.array(numbers[:70]), mx.quantize(mx.array(numbers), group_size=64, bits=bits)
    made.takes(parts[0], parts[1], bits)
    same, plain = made(x, *parts, bits, 64)
    mx.eval(same)
    wanted = mx.dequantize(*parts, group_size=64, bits=bits)
    close = mx.allclose(plain.astype(mx.float32), wanted.astype(mx.float32), rtol=0, atol=0.01)
    return bool(mx.array_equal(same, x).item() and close.item())
