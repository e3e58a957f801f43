"""Small GEMM: matrix products of dozens or hundreds of rows on CUDA, with less time of the host than MLX's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core.compute_path import KernelName
from ..device.cuda import CudaKernel, NewKernel
from ..device.self_test import SelfTested, self_tested

SIDE, DEEP = 64, 64
"""Rows and columns of a block's tile of y, and the columns of x and W that it multiplies at a time."""
MOST = 1 << 31
"""The most multiplications: beyond, MLX's product is faster by more than its launch takes the host."""
_STAGES, _THREADS = 4, 128
_BODY = """
  treadle::small_gemm<T, STAGES, BIASED>(x, w, ADDED, out, x_shape[0], w_shape[0], x_shape[1]);
"""


class SmallGemm:
    """x W^T for weights W (N, K) that are not quantized.

    MLX's own product is cuBLASLt's, captured as a graph: 18.5 us of the host, where a kernel is started in 3.
    """

    def __init__(self, kernel: NewKernel = CudaKernel) -> None:
        self._kernel, self._biased = (_made(kernel, biased) for biased in (False, True))

    @staticmethod
    def takes(outputs: int, columns: int, dtype: Any) -> bool:
        """Whether the kernel supports such a weight."""
        return dtype in (mx.bfloat16, mx.float16) and columns % DEEP == 0 and outputs % 2 == 0

    @staticmethod
    def pays(rows: int, weight: Any) -> bool:
        """Whether it is faster than MLX for so many rows."""
        return bool(rows * weight.size <= MOST)

    def __call__(self, x: Any, weight: Any, bias: Any | None = None) -> Any:
        """(T, N) of `x` (T, K), in the weight's type; plus `bias` (N,)."""
        rows, outputs, biased = x.shape[0], weight.shape[0], bias is not None
        return (self._biased if biased else self._kernel)(
            [x, weight, *([bias] if biased else [])],
            [("T", x.dtype), ("STAGES", _STAGES), ("BIASED", biased)],
            blocks=(-(-rows // SIDE), -(-outputs // SIDE)),
            threads=_THREADS,
            shapes=[(rows, outputs)],
            dtypes=[x.dtype],
        )[0]


def _made(kernel: NewKernel, biased: bool) -> CudaKernel:
    memory, files = _STAGES * 2 * SIDE * DEEP * 2, ["device/numbers.cuh", "fused/small_gemm.cuh"]
    body = _BODY.replace("ADDED", "added" if biased else "(const T*)nullptr")
    names = ["x", "w", *(["added"] if biased else [])]
    return kernel("small_gemm", names, ["out"], body, files=files, shared_memory=memory)


def small_gemm(kernel: NewKernel = CudaKernel) -> SelfTested[SmallGemm]:
    """The kernel with the outcome of its self-test."""
    return self_tested(
        KernelName.SMALL_GEMM,
        lambda: SmallGemm(kernel),
        _why_not,
        instead="MLX multiplies dozens of rows (the host takes 15 us longer for each product)",
    )


def _why_not(made: SmallGemm) -> str:
    """Return what is wrong with a product; empty if nothing is."""
    dice = np.random.default_rng(0)
    shapes = ((100, 320), (72, 320), (72,))
    x, weight, bias = (mx.array(dice.normal(0, 1, shape).astype(np.float16)) for shape in shapes)
    wanted = x.astype(mx.float32) @ weight.astype(mx.float32).T
    pairs = ((made(x, weight), wanted), (made(x, weight, bias), wanted + bias))
    right = all(mx.allclose(one.astype(mx.float32), want, rtol=0.01, atol=0.1).item() for one, want in pairs)
    return "" if right else "its product is not what it should be"
