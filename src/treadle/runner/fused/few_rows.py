"""Matrix products of few rows on CUDA, in one reading of the weights."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import mlx.core as mx

from ..cuda import CudaKernel, NewKernel

MOST_ROWS = {16: 0, 8: 64, 4: 64}
"""By bits of a weight: more rows than these are faster through MLX."""
_COLUMNS = {16: 128, 8: 256, 4: 256}
_BLOCKS = 264
_MOST_SPLITS = 8
_BODY = """
  treadle::few_rows<T, MT, BITS, GROUP, KB>(
      x, reinterpret_cast<const unsigned*>(w), s, b, out, partial, const_cast<int*>(counters), x_shape[0], w_shape[0],
      x_shape[1], *splits);
"""


class FewRows:
    """x W^T for weights W (N, K) of `bits` bits: plain (16), or quantized with `scales` and `biases` in groups of
    `group`. `kernel` makes the kernel. Raises NotImplementedError where that does not fit them."""

    def __init__(
        self,
        weight: Any,
        scales: Any | None,
        biases: Any | None,
        bits: int,
        group: int,
        dtype: Any,
        kernel: NewKernel = CudaKernel,
    ) -> None:
        self._kernel = kernel
        self._weight = weight
        self._scales = weight if scales is None else scales
        self._biases = weight if biases is None else biases
        self._bits, self._group = (bits, group) if scales is not None else (16, 0)
        self.inputs = int(weight.shape[1]) if scales is None else int(weight.shape[1]) * 32 // bits
        self.outputs = int(weight.shape[0])
        if self._bits not in _COLUMNS or self.inputs % _COLUMNS[self._bits] or dtype not in (mx.bfloat16, mx.float16):
            raise NotImplementedError(f"a product of {self.inputs} columns with weights of {self._bits} bits")
        if self._bits < 16 and group not in (64, 128):
            raise NotImplementedError(f"groups of {group}")
        self._dtype = dtype
        blocks = -(-self.outputs // 64)
        stages = self.inputs // _COLUMNS[self._bits]
        self._splits = max(1, min(_MOST_SPLITS, stages, -(-_BLOCKS // blocks)))
        self._counters = mx.zeros(blocks, mx.int32)
        self._split = mx.array([self._splits], mx.int32)
        mx.eval(self._counters, self._split)

    @property
    def most_rows(self) -> int:
        """Rows up to which this is the way."""
        return MOST_ROWS[self._bits]

    def __call__(self, x: Any) -> Any:
        """(T, N) of `x` (T, K)."""
        rows, columns = x.shape[0], _COLUMNS[self._bits]
        tiles = next(n for n in (1, 2, 4, 8) if rows <= 8 * n)
        partial = self._splits * rows * self.outputs if self._splits > 1 else 1
        return _made(self._kernel, tiles, self._bits, columns)(
            [x, self._weight, self._scales, self._biases, self._counters, self._split],
            [("T", x.dtype), ("MT", tiles), ("BITS", self._bits), ("GROUP", self._group or 64), ("KB", columns)],
            blocks=(-(-self.outputs // 64), self._splits),
            threads=128,
            shapes=[(rows, self.outputs), (partial,)],
            dtypes=[x.dtype, mx.float32],
        )[0]


@cache
def _made(kernel: NewKernel, tiles: int, bits: int, columns: int) -> CudaKernel:
    staged = 2 * tiles * 8 * columns * 2
    sums = 0 if bits == 16 else 2 * (columns // 64) * tiles * 8 * 4
    return kernel(
        "few_rows",
        ["x", "w", "s", "b", "counters", "splits"],
        ["out", "partial"],
        _BODY,
        header=resources.files(__package__).joinpath("few_rows.cuh").read_text(encoding="utf-8"),
        shared_memory=staged + sums,
    )
