"""The CUDA kernels that attend to a pool's pages, behind one function."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from ...device.cuda import CudaKernel, bits_of
from ...device.properties import DeviceProperties
from ..backend import Unsupported
from .pool import Pool, PoolKernels
from .tiling import FEW, MANY, TILE, Tiles

HEAD_DIMS = (64, 128, 256)
_LOG2_E = 1.4426950408889634
_MANY_TILES = (64, 16)
"""Cached tokens that a block for many rows looks at together, where there is shared memory for so many."""
_RINGS = (5, 4, 3, 2)
"""Tiles of a warp's ring in a block for few rows."""
_STATIC, _FLAGS = 1024, 272
"""Bytes that the device keeps of a block's shared memory, or that kernels have fixed; what those for few rows have."""
_INPUTS = ["q", "pool", "factors", "pages", "items", "counters", "written", "partial", "scales"]
_FEW_BODY = """
  treadle::attend_few<T, S, D, REP, PAGE, WINDOW, ROWS, STAGES>(
      q, pool, (const float*)factors, pages, items + (gridDim.x + 8) / 8 * 8, items, __int_as_float(SCALE), out,
      const_cast<float*>(partial), const_cast<float*>(scales), const_cast<int*>(counters), HEADS);
"""
_MANY_BODY = """
  treadle::attend_many<T, D, REP, PAGE, WINDOW, TILE>(
      q, pool, pages, items, __int_as_float(SCALE), out, const_cast<float*>(partial), const_cast<float*>(scales),
      const_cast<int*>(counters), HEADS);
"""
_FEW_WARPS = 4


@dataclass(frozen=True)
class AttentionShape:
    """A layer's attention: kv heads, query heads, dimensions of each, and the type of keys and values."""

    heads: int
    query_heads: int
    dim: int
    dtype: Any


@dataclass
class Kernels(PoolKernels):
    """Attention over such pools, with `rep` query heads for each kv head, cut for `chip`."""

    rep: int = 1
    chip: DeviceProperties = field(default_factory=DeviceProperties)
    _left: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict, repr=False, kw_only=True)

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
        if (group := shape.query_heads // shape.heads) > FEW[-1]:
            raise Unsupported(f"{group} query heads share a kv head, and the kernels take {FEW[-1]} at most")

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
        """Attention (T, query heads, 1, D) of `queries` of that shape over what is in `pages` (int32, all rows' pages
        one after the other) of the pool; `tiles` says which. `window` is 0 for none. `counters` are zeros, and are so
        again afterwards: at least as many as partial results times kv heads."""
        few = tiles.rows != MANY
        if not few and pool.scales is not None:  # what many rows read again and again is worth making plain
            pool, written = self.dequantize(pool, pages, written, queries)
            pages = mx.arange(pages.shape[0], dtype=mx.int32)
        factors = counters if pool.scales is None else pool.scales
        return (self._few if few else self._many)(
            [queries, pool.data, factors, pages, tiles.items, counters, written, *self._left_over(tiles)],
            [
                ("T", self.dtype),
                ("D", self.dim),
                ("REP", self.rep),
                ("PAGE", self.page),
                ("WINDOW", window),
                ("HEADS", self.heads),
                ("ROWS", tiles.rows),
                ("SCALE", bits_of(scale * _LOG2_E)),
                *([("S", pool.data.dtype), ("STAGES", self._stages)] if few else [("TILE", self._tile)]),
            ],
            blocks=(tiles.blocks, self.heads),
            threads=128 if few or self.dim <= 128 else 256,
            shapes=[queries.shape],
            dtypes=[self.dtype],
        )[0]

    def close(self) -> None:
        super().close()
        self._left.clear()

    def _left_over(self, tiles: Tiles) -> tuple[Any, Any]:
        """Room for what the parts of tiles leave to be merged, with its scales: each launch of as many writes over the
        last one's. Arrays that are made anew cost the host 2 us each, and are all kept until a pass has ended."""
        key = tiles.rows, tiles.parts
        if key not in self._left:
            lines = tiles.parts * self.heads * tiles.rows
            self._left[key] = mx.zeros(max(1, lines * self.dim)), mx.zeros(max(1, lines * 2))
            mx.eval(self._left[key])
        return self._left[key]

    def check_memory(self) -> None:
        """Raise Unsupported where a block of the device has too little shared memory for the kernels."""
        needs = max(self._few_memory(_RINGS[-1]), self._many_memory(_MANY_TILES[-1]))
        if needs + _STATIC > self.chip.shared:
            raise Unsupported(
                f"heads of {self.dim} dimensions take {needs} bytes of shared memory, and {self.chip.shared} are there"
            )

    @cached_property
    def _stages(self) -> int:
        """As deep a ring as lets two blocks share a multiprocessor, or one where two can't."""
        room = (self.chip.shared + _STATIC) // 2 - _STATIC - _FLAGS
        twice = (depth for depth in _RINGS if self._few_memory(depth) <= room)
        once = (depth for depth in _RINGS if self._few_memory(depth) + _STATIC <= self.chip.shared)
        return next(twice, 0) or next(once)

    @cached_property
    def _tile(self) -> int:
        return next(tile for tile in _MANY_TILES if self._many_memory(tile) + _STATIC <= self.chip.shared)

    def _few_memory(self, stages: int) -> int:
        """A ring of tiles for each warp, and a place for its sums."""
        line = self.dim + 4 if self.int8 else self.dim * int(self.dtype.size)
        return _FEW_WARPS * (stages * 2 * TILE * line + 8 * (self.dim + 4) * 4)

    def _many_memory(self, tile: int) -> int:
        """Queries, and two tiles of keys and of values."""
        return (MANY + 4 * tile) * self.dim * int(self.dtype.size)

    @cached_property
    def _few(self) -> CudaKernel:
        return self._attend("few", _FEW_BODY, self._few_memory(self._stages))

    @cached_property
    def _many(self) -> CudaKernel:
        return self._attend("many", _MANY_BODY, self._many_memory(self._tile))

    def _attend(self, kind: str, body: str, memory: int) -> CudaKernel:
        name = f"attend_{kind}"
        files = ["device/numbers.cuh", "kv/paged/attention.cuh", f"kv/paged/{name}.cuh"]
        return self.kernel(name, _INPUTS, ["out"], body, files=files, shared_memory=memory)
