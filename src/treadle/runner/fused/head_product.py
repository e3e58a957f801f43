"""Products of each head with a weight of its own, as multi-head latent attention has them around its latents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from ..device.cuda import CudaKernel, NewKernel, bits_of
from .quantization import WIDTHS, Quantization

SIZES = (8, 16, 32, 64)
"""Rows that kernels are compiled for; more go to MLX."""
_GROUPS, _UNIT, _TILE, _WARPS, _THREADS = (16, 32, 64, 128), 64, 16, 4, 128
_ROTATION_FILES = ["device/numbers.cuh", "fused/mixers.cuh"]
_FILES = [*_ROTATION_FILES, "fused/quantized.cuh", "fused/packed_gemm.cuh", "fused/head_product.cuh"]
_PRODUCT = """
  treadle::head_product<MODE, BITS, GROUP, ROWS, HEADS, K, FIRST, STEP, PARTS>(
      x, (const unsigned char*)w, s, (const T*)b, out, x_shape[0], w_shape[1], x_shape[1]);
"""
_ROTATE = """
  treadle::rotate_heads<HEADS, ROTATED_FIRST, STEP, R, ROTATED, INTERLEAVED>(
      x, (const float*)cos_sin, rotated, x_shape[0], x_shape[1], __int_as_float(SCALE), BLOCK, BLOCKS);
"""
_ALONE = _ROTATE.replace("BLOCKS", "gridDim.x").replace("BLOCK", "blockIdx.x")
_BOTH = f"""
  if (blockIdx.y < HEADS) {{{_PRODUCT}  return;
  }}""" + _ROTATE.replace("BLOCKS", "(gridDim.y - HEADS) * gridDim.x").replace(
    "BLOCK", "(blockIdx.y - HEADS) * gridDim.x + blockIdx.x"
)
_EACH = 4
"""Pairs that a thread rotates beside a product."""


@dataclass(frozen=True)
class Rotated:
    """Dimensions of each head that are rotated and multiplied by `scale`: `dims` of them, from the head's dimension
    `first` on. Pairs are `interleaved`, or half of them apart."""

    first: int
    dims: int
    scale: float
    interleaved: bool = False

    def template(self, first: int, cos_sin: Any | None) -> list[tuple[str, Any]]:
        """What the kernel is compiled for, where the first head begins in column `first`."""
        return [
            *[("ROTATED_FIRST", first + self.first), ("R", self.dims), ("ROTATED", cos_sin is not None)],
            *[("INTERLEAVED", self.interleaved), ("SCALE", bits_of(self.scale))],
        ]


@dataclass(frozen=True)
class HeadProduct:
    """x W^T for each head, with weights (H, N, K), quantized by `scales` and `biases` as `way` says, or not (None, 16
    bits). `kernel` makes kernels for x of `dtype`."""

    weight: Any
    scales: Any | None
    biases: Any | None
    way: Quantization | None
    kernel: NewKernel
    dtype: Any

    @property
    def heads(self) -> int:
        return int(self.weight.shape[0])

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[1])

    @property
    def columns(self) -> int:
        return int(self.weight.shape[2]) if self.way is None else self.way.columns(self.weight)

    def __call__(self, x: Any, first: int, step: int) -> Any:
        """(T, H, N) of `x` (T, X), where head h is in the columns from `first` + h * `step` on."""
        if not self._takes(x, first, step):
            return self._by_mlx(x, first, step)
        return _product(self.kernel)(
            self._inputs(x),
            [*self._heads(x, step), *self._template(x, first)],
            blocks=(self._across, self.heads),
            threads=_THREADS,
            shapes=[(x.shape[0], self.heads, self.outputs)],
            dtypes=[x.dtype],
        )[0]

    def with_rotated(self, x: Any, first: int, step: int, rotated: Rotated, cos_sin: Any | None) -> tuple[Any, Any]:
        """As by a call, and the heads' `rotated` dimensions (T, H, R), by `cos_sin` (T, R / 2, 2), or not
        rotated (None)."""
        shape = (x.shape[0], self.heads, rotated.dims)
        count, rotation = math.prod(shape) // 2, x if cos_sin is None else cos_sin
        template = [*self._heads(x, step), *rotated.template(first, cos_sin)]
        if not self._takes(x, first, step):
            made = _rotation(self.kernel)(
                [x, rotation],
                template,
                blocks=(-(-count // _THREADS), 1),
                threads=_THREADS,
                shapes=[shape],
                dtypes=[x.dtype],
            )
            return self._by_mlx(x, first, step), made[0]
        y, turned = _both(self.kernel)(
            [*self._inputs(x), rotation],
            [*template, *self._template(x, first)],
            blocks=(self._across, self.heads + -(-count // (_EACH * _THREADS * self._across))),
            threads=_THREADS,
            shapes=[(x.shape[0], self.heads, self.outputs), shape],
            dtypes=[x.dtype] * 2,
        )
        return y, turned

    def _takes(self, x: Any, first: int, step: int) -> bool:
        """Whether the kernel takes such a product."""
        aligned = not (first % 8 or step % 8 or x.shape[1] % 8 or self.columns % _UNIT)
        known = self.way is None or (self.way.bits in WIDTHS and self.way.group in _GROUPS)
        known = known and (self.way is not None or self.weight.dtype == x.dtype)
        return aligned and known and x.shape[0] <= SIZES[-1] and x.dtype in (mx.bfloat16, mx.float16)

    def _inputs(self, x: Any) -> list[Any]:
        scales = self.weight if self.scales is None else self.scales
        return [x, self.weight, scales, scales if self.biases is None else self.biases]

    def _heads(self, x: Any, step: int) -> list[tuple[str, Any]]:
        return [("T", x.dtype), ("HEADS", self.heads), ("STEP", step)]

    def _template(self, x: Any, first: int) -> list[tuple[str, Any]]:
        mode, bits, group = (0, 16, _UNIT) if self.way is None else (self.way.number, self.way.bits, self.way.group)
        rows = next(size for size in SIZES if x.shape[0] <= size)
        sizes = [("FIRST", first), ("K", self.columns), ("ROWS", rows), ("PARTS", self._parts)]
        return [*sizes, ("MODE", mode), ("BITS", bits), ("GROUP", group)]

    @property
    def _parts(self) -> int:
        """Warps that share a tile."""
        return next(parts for parts in (4, 2, 1) if self.columns >= parts * _UNIT)

    @property
    def _across(self) -> int:
        """Blocks of a head."""
        return -(-self.outputs // (_TILE * _WARPS // self._parts))

    def _by_mlx(self, x: Any, first: int, step: int) -> Any:
        own = x[:, first : first + self.heads * step].reshape(x.shape[0], self.heads, step)
        own = own[..., : self.columns].swapaxes(0, 1)
        return multiply_by_heads(own, self.weight, self.scales, self.biases, self.way).swapaxes(0, 1)


def multiply_by_heads(
    x: Any, weight: Any, scales: Any | None, biases: Any | None, way: Quantization | None, *, transpose: bool = True
) -> Any:
    """x W^T by MLX for x (..., heads, L, K) and a weight for each head; x W without `transpose`."""
    if way is None:
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)
    options: dict[str, Any] = {"group_size": way.group, "bits": way.bits, "mode": way.mode}
    assert scales is not None
    return mx.quantized_matmul(mx.contiguous(x), weight, scales, biases, transpose=transpose, **options)


@cache
def _product(kernel: NewKernel) -> CudaKernel:
    return kernel("head_product", ["x", "w", "s", "b"], ["out"], _PRODUCT, files=_FILES)


@cache
def _rotation(kernel: NewKernel) -> CudaKernel:
    return kernel("rotate_heads", ["x", "cos_sin"], ["rotated"], _ALONE, files=_ROTATION_FILES)


@cache
def _both(kernel: NewKernel) -> CudaKernel:
    return kernel("absorb_queries", ["x", "w", "s", "b", "cos_sin"], ["out", "rotated"], _BOTH, files=_FILES)
