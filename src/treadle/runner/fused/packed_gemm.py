"""Packed GEMM: matrix products of few rows on CUDA with weights quantized in any of MLX's ways.

`SkinnyGemm` reads weights of 4 and 8 bits faster, but not of all shapes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...core.compute_path import KernelName
from ..device.cuda import CudaKernel, NewKernel
from ..device.properties import DeviceProperties
from ..device.self_test import SelfTested, self_tested
from .quantization import WIDTHS, Quantization

SIZES = (8, 16, 32, 64)
"""Rows of x that kernels are compiled for."""
_GROUPS = (16, 32, 64, 128)
_COLUMNS, _STAGE, _TILE = 64, 256, 16
_TILES, _DEPTHS = (4, 2, 1), (4, 3, 2)
_WARPS = 4
_FILES = ("device/numbers.cuh", "fused/quantized.cuh", "fused/packed_gemm.cuh")
_BODY = """
  treadle::packed_gemm<T, S, MODE, BITS, GROUP, ROWS, TILES, DEPTH, BIASED>(
      x, (const unsigned char*)w, s, (const T*)b, ADDED, out, x_shape[0], w_shape[0], x_shape[1]);
"""


class PackedGemm:
    """x W^T for a `weight` (N, K) with `scales` and `biases`, quantized as `way` says, and x of `dtype`. `kernel` makes
    the kernels for `chip`. Raises NotImplementedError for weights that they do not support."""

    def __init__(
        self,
        weight: Any,
        scales: Any,
        biases: Any | None,
        way: Quantization,
        dtype: Any,
        kernel: NewKernel = CudaKernel,
        chip: DeviceProperties | None = None,
    ) -> None:
        columns = way.columns(weight)
        known = way.bits in WIDTHS and way.group in _GROUPS and dtype is not None
        known = known and dtype in (mx.bfloat16, mx.float16)
        if not known or columns % _COLUMNS or columns * way.bits // 8 % 16:
            raise NotImplementedError(f"weights of {columns} columns in {way} for {dtype}")
        self._arrays = [weight, scales, scales if biases is None else biases]
        self._way = way
        self._kernel = kernel
        self._chip = DeviceProperties.of(mx.device_info()) if chip is None else chip
        self._outputs = int(weight.shape[0])
        wide = [tiles for tiles in _TILES if -(-self._outputs // (_TILE * tiles)) >= self._chip.processors]
        self._tiles = wide[0] if wide else _TILES[-1]
        fitting = [size for size in SIZES if _DEPTHS[-1] * self._stage(size) <= self._chip.shared]
        self.most_rows = fitting[-1]

    def __call__(self, x: Any, bias: Any | None = None) -> Any:
        """(T, N) of `x` (T, K), at most `most_rows` rows; plus `bias` (N,)."""
        rows = next(size for size in SIZES if x.shape[0] <= size)
        depth, shared = self._memory(rows)
        way, tiles = self._way, self._tiles_for(rows)
        y = _made(self._kernel, shared, bias is not None)(
            [x, *self._arrays, *(() if bias is None else (bias,))],
            [
                ("T", x.dtype),
                ("S", self._arrays[1].dtype),
                ("MODE", way.number),
                ("BITS", way.bits),
                ("GROUP", way.group),
                ("ROWS", rows),
                ("TILES", tiles),
                ("DEPTH", depth),
                ("BIASED", bias is not None),
            ],
            blocks=(-(-self._outputs // (_TILE * tiles)), 1),
            threads=32 * _WARPS * tiles,
            shapes=[(x.shape[0], self._outputs)],
            dtypes=[x.dtype],
        )
        return y[0]

    def _memory(self, rows: int) -> tuple[int, int]:
        """Stages in flight, and bytes of a block's shared memory: for these, or for sums to add."""
        depth = next(depth for depth in _DEPTHS if depth * self._stage(rows) <= self._chip.shared)
        sums = (_WARPS - 1) * self._tiles_for(rows) * rows // 8 * 512
        return depth, max(depth * self._stage(rows), sums)

    def _tiles_for(self, rows: int) -> int:
        """Tiles of a block: its threads have too few registers for the largest batch and more than two."""
        return min(self._tiles, 2) if rows == SIZES[-1] else self._tiles

    def _stage(self, rows: int) -> int:
        """Bytes of a stage of weights and x."""
        return self._tiles_for(rows) * _TILE * (_STAGE * self._way.bits // 8 + 16) + rows * (_STAGE * 2 + 16)


@cache
def _made(kernel: NewKernel, shared: int, biased: bool) -> CudaKernel:
    """The kernel with so much shared memory, which follows from its template's arguments."""
    inputs = ["x", "w", "s", "b", *(["added"] if biased else [])]
    body = _BODY.replace("ADDED", "added" if biased else "(const T*)nullptr")
    return kernel("packed_gemm", inputs, ["out"], body, files=_FILES, shared_memory=shared)


def packed_gemm(way: Quantization, dtype: Any, kernel: NewKernel = CudaKernel) -> SelfTested[NewKernel]:
    """The kernels' factory with the outcome of their self-test for weights quantized like that."""
    return self_tested(
        KernelName.PACKED_GEMM,
        lambda: kernel,
        lambda made: _why_not(way, dtype, made),
        instead=f"MLX multiplies few rows with weights of {way} (several times as long)",
    )


def _why_not(way: Quantization, dtype: Any, kernel: NewKernel) -> str:
    """Return what is wrong with a product; empty if nothing is."""
    dice = np.random.default_rng(0)
    x, weight = (mx.array(dice.normal(0, 1, shape).astype(np.float32)).astype(dtype) for shape in ((5, 384), (72, 384)))
    parts = way.quantize(weight)
    wanted = x.astype(mx.float32) @ way.dequantize(*parts).astype(mx.float32).T
    found = PackedGemm(*parts, way, dtype, kernel)(x).astype(mx.float32)
    right = mx.allclose(found, wanted, rtol=0.02, atol=1.0).item()
    return "" if right else "its product is not what it should be"
