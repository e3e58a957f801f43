"""CUDA kernels for attention over the pages of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from ...device.cuda import CudaKernel, bits_of
from ...device.properties import DeviceProperties
from ..backend import Unsupported
from .pool import Pool, PoolKernels
from .tiling import DECODE_ROWS, PREFILL_ROWS, TILE, Tiles

HEAD_DIMS = (64, 80, 96, 128, 256)
_WIDTHS = (64, 128, 256)
"""Dimensions of a row in shared memory: those of a head, padded."""
_LOG2_E = 1.4426950408889634
_PREFILL_TILES = (64, 16)
"""Cached tokens that a block of the prefill kernel reads together, by the shared memory there is."""
_RINGS = (5, 4, 3, 2)
"""Depths of a warp's ring of tiles in a block of the decode kernel."""
_STATIC, _FLAGS = 1024, 272
"""Bytes of a block's shared memory that the device or a kernel reserves, and those that the decode kernel does."""
_INPUTS = ["q", "pool", "kv_scales", "pages", "items", "counters", "written", "partial", "scales"]
_DECODE_BODY = """
  treadle::attend_decode<T, S, D, REP, PAGE, WINDOW, ROWS, STAGES>(
      q, pool, (const float*)kv_scales, pages, items + (gridDim.x + 8) / 8 * 8, items, __int_as_float(SCALE), out,
      const_cast<float*>(partial), const_cast<float*>(scales), const_cast<int*>(counters), HEADS);
"""
_PREFILL_BODY = """
  treadle::attend_prefill<T, D, REP, PAGE, WINDOW, TILE>(
      q, pool, pages, items, __int_as_float(SCALE), out, const_cast<float*>(partial), const_cast<float*>(scales),
      const_cast<int*>(counters), HEADS);
"""
_DECODE_WARPS = 4


@dataclass(frozen=True)
class AttentionShape:
    """A layer's attention: kv heads, query heads, dimensions of each head, and the type of keys and values."""

    heads: int
    query_heads: int
    dim: int
    dtype: Any


@dataclass
class Kernels(PoolKernels):
    """Attention over such pools, with `rep` query heads for each kv head, on a device like `chip`."""

    rep: int = 1
    chip: DeviceProperties = field(default_factory=DeviceProperties)
    _partial: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict, repr=False, kw_only=True)

    @property
    def short(self) -> int:
        """The most tokens of a segment that the decode kernel takes; longer ones go to the prefill kernel."""
        return DECODE_ROWS[-1] // self.rep

    @classmethod
    def check(cls, shape: AttentionShape) -> None:
        """Raise Unsupported where these kernels can't compute such attention."""
        if shape.dtype not in cls.dtypes:
            raise Unsupported(f"attention kernels compute in bfloat16 and float16, not in {shape.dtype}")
        if shape.dim not in HEAD_DIMS:
            dims = ", ".join(map(str, HEAD_DIMS))
            raise Unsupported(f"attention kernels take heads of {dims} dimensions, not of {shape.dim}")
        if shape.query_heads % shape.heads:
            raise Unsupported(f"{shape.query_heads} query heads can't share {shape.heads} kv heads evenly")
        if (group := shape.query_heads // shape.heads) > DECODE_ROWS[-1]:
            raise Unsupported(f"{group} query heads share a kv head, and the kernels take {DECODE_ROWS[-1]} at most")

    def attend(
        self,
        queries: Any,
        pool: Pool,
        tiles: Tiles,
        pages: Any,
        counters: Any,
        written: Any,
        *,
        scale: float,
        window: int,
    ) -> Any:
        """Attention (T, query heads, 1, D) of `queries` of that shape over the pool's `pages` (int32, the page tables
        of all sequences one after the other), as `tiles` says. `window` is 0 for none. `counters` are zeros, and are
        again afterwards: at least as many as partial results times kv heads."""
        decode = tiles.rows != PREFILL_ROWS
        if not decode and pool.scales is not None:  # many rows read the same pages again and again
            pool, written = self.dequantize(pool, pages, written, queries)
            pages = mx.arange(pages.shape[0], dtype=mx.int32)
        kv_scales = counters if pool.scales is None else pool.scales
        return (self._decode if decode else self._prefill)(
            [queries, pool.data, kv_scales, pages, tiles.items, counters, written, *self._partial_results(tiles)],
            [
                ("T", self.dtype),
                ("D", self.dim),
                ("REP", self.rep),
                ("PAGE", self.page),
                ("WINDOW", window),
                ("HEADS", self.heads),
                ("ROWS", tiles.rows),
                ("SCALE", bits_of(scale * _LOG2_E)),
                *([("S", pool.data.dtype), ("STAGES", self._stages)] if decode else [("TILE", self._tile)]),
            ],
            blocks=(tiles.blocks, self.heads),
            threads=128 if decode or self.dim <= 128 else 256,
            shapes=[queries.shape],
            dtypes=[self.dtype],
        )[0]

    def close(self) -> None:
        super().close()
        self._partial.clear()

    def _partial_results(self, tiles: Tiles) -> tuple[Any, Any]:
        """Memory for partial results of split tiles, and for their scales; launches with as many parts use it in turn.
        New arrays cost the host 2 us each, and are all kept until a pass has ended."""
        key = tiles.rows, tiles.parts
        if key not in self._partial:
            rows = tiles.parts * self.heads * tiles.rows
            self._partial[key] = mx.zeros(max(1, rows * self.dim)), mx.zeros(max(1, rows * 2))
            mx.eval(self._partial[key])
        return self._partial[key]

    def check_memory(self) -> None:
        """Raise Unsupported where a block of the device has too little shared memory for the kernels."""
        needs = max(self._decode_memory(_RINGS[-1]), self._prefill_memory(_PREFILL_TILES[-1]))
        if needs + _STATIC > self.chip.shared:
            raise Unsupported(
                f"heads of {self.dim} dimensions take {needs} bytes of shared memory, and {self.chip.shared} are there"
            )

    @cached_property
    def _stages(self) -> int:
        """The deepest ring with which two blocks share a multiprocessor, or one block where two can't."""
        available = (self.chip.shared + _STATIC) // 2 - _STATIC - _FLAGS
        twice = (depth for depth in _RINGS if self._decode_memory(depth) <= available)
        once = (depth for depth in _RINGS if self._decode_memory(depth) + _STATIC <= self.chip.shared)
        return next(twice, 0) or next(once)

    @cached_property
    def _tile(self) -> int:
        return next(tile for tile in _PREFILL_TILES if self._prefill_memory(tile) + _STATIC <= self.chip.shared)

    def _decode_memory(self, stages: int) -> int:
        """Bytes of shared memory: a ring of tiles for each warp, and its sums."""
        line = self._width + 4 if self.int8 else self._width * int(self.dtype.size)
        return _DECODE_WARPS * (stages * 2 * TILE * line + 8 * (self.dim + 4) * 4)

    def _prefill_memory(self, tile: int) -> int:
        """Bytes of shared memory: queries, and two tiles of keys and of values."""
        return (PREFILL_ROWS + 4 * tile) * self._width * int(self.dtype.size)

    @property
    def _width(self) -> int:
        """Dimensions of a row in shared memory."""
        return next(width for width in _WIDTHS if self.dim <= width)

    @cached_property
    def _decode(self) -> CudaKernel:
        return self._attend("decode", _DECODE_BODY, self._decode_memory(self._stages))

    @cached_property
    def _prefill(self) -> CudaKernel:
        return self._attend("prefill", _PREFILL_BODY, self._prefill_memory(self._tile))

    def _attend(self, kind: str, body: str, memory: int) -> CudaKernel:
        name = f"attend_{kind}"
        files = ["device/numbers.cuh", "kv/paged/attention.cuh", f"kv/paged/{name}.cuh"]
        return self.kernel(name, _INPUTS, ["out"], body, files=files, shared_memory=memory)
