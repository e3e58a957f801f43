"""The CUDA kernels of the paged cache, behind one function each.

A pool is one layer's cache, (pages, 2, kv heads, page, D): keys, then values. The kernels write to it in place, which
MLX does not know of: it only sees that they read it. What keeps the order right is that `write` returns a token that
`attend` takes, that both run on one stream, and that nothing else ever makes a new array out of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any, ClassVar

import mlx.core as mx

from ..cuda import CudaKernel
from .work import FEW, MANY, Tiles

HEAD_DIMS = (64, 128, 256)
_LOG2_E = 1.4426950408889634
_MANY_TILE = {64: 64, 128: 64, 256: 32}
_ATTEND_INPUTS = ["q", "pool", "pages", "items", "scale", "counters", "written"]
_ATTEND_BODY = """
  treadle::attend_{kind}<T, D, REP, PAGE, WINDOW, {tile}>(
      q, pool, pages, items, scale, out, partial, scales, const_cast<int*>(counters), HEADS);
"""
_WRITE_BODY = """
  constexpr int CHUNKS = D / 8;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) written[0] = 0;
  const int chunk = i % CHUNKS, h = i / CHUNKS % HEADS, token = i / (CHUNKS * HEADS);
  if (token >= *count) return;
  const int slot = slots[token];
  uint4* to = reinterpret_cast<uint4*>(const_cast<T*>(pool)) +
      (size_t(slot / PAGE) * 2 * HEADS + h) * PAGE * CHUNKS + slot % PAGE * CHUNKS + chunk;
  to[0] = reinterpret_cast<const uint4*>(k)[i];
  to[size_t(HEADS) * PAGE * CHUNKS] = reinterpret_cast<const uint4*>(v)[i];
"""
_COPY_BODY = """
  const size_t each = size_t(2) * HEADS * PAGE * D / 8;
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i == 0) written[0] = 0;
  if (i >= each) return;
  uint4* at = reinterpret_cast<uint4*>(const_cast<T*>(pool));
  at[which[1] * each + i] = at[which[0] * each + i];
"""


@dataclass(frozen=True)
class AttentionShape:
    """A layer's attention: kv heads, query heads, dimensions of each, and the type of keys and values."""

    heads: int
    query_heads: int
    dim: int
    dtype: Any


@dataclass
class Kernels:
    """The kernels for pools of `heads` kv heads of `dim` dimensions, `rep` query heads each, in pages of `page` tokens.

    Compiled at their first use; what the compiler says then comes as a RuntimeError out of the evaluation. `kernel` is
    what they are made of, `dtypes` what they compute in, and `compile` compiles programs that use them.
    """

    kernel: ClassVar[type[CudaKernel]] = CudaKernel
    dtypes: ClassVar[tuple[Any, ...]] = (mx.bfloat16, mx.float16)
    compile: ClassVar[Callable[..., Any]] = staticmethod(mx.compile)

    heads: int
    rep: int
    dim: int
    page: int
    dtype: Any
    _scales: dict[float, Any] = field(default_factory=dict)

    @classmethod
    def fits(cls, shape: AttentionShape) -> str:
        """Why these kernels can't serve such attention; empty when they can."""
        if shape.dtype not in cls.dtypes:
            return f"attention kernels compute in bfloat16 and float16, not in {shape.dtype}"
        if shape.dim not in HEAD_DIMS:
            return f"attention kernels take heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not of {shape.dim}"
        if shape.query_heads % shape.heads:
            return f"{shape.query_heads} query heads can't share {shape.heads} kv heads evenly"
        if (group := shape.query_heads // shape.heads) > FEW[-1]:
            return f"{group} query heads share a kv head, and the kernels take {FEW[-1]} at most"
        return ""

    def write(self, pool: Any, keys: Any, values: Any, slots: Any, count: Any) -> Any:
        """Put `keys` and `values` (T, kv heads, 1, D) at `slots` (T,) of the pool, of which the first `count` (1,) are
        real. What comes back says to `attend` that it is done."""
        return self._write(
            [keys, values, pool, slots, count],
            [("T", self.dtype), ("D", self.dim), ("HEADS", self.heads), ("PAGE", self.page)],
            blocks=(-(-keys.size // 8 // 256), 1),
            threads=256,
            shapes=[(1,)],
            dtypes=[mx.int32],
        )[0]

    def copy_page(self, pool: Any, which: Any) -> Any:
        """Copy page `which[0]` of the pool over page `which[1]`."""
        return self._copy(
            [pool, which],
            [("T", self.dtype), ("D", self.dim), ("HEADS", self.heads), ("PAGE", self.page)],
            blocks=(-(-2 * self.heads * self.page * self.dim // 8 // 256), 1),
            threads=256,
            shapes=[(1,)],
            dtypes=[mx.int32],
        )[0]

    def attend(
        self,
        queries: Any,
        pool: Any,
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
        again afterwards: at least as many as tiles times kv heads."""
        rows, threads, kind, memory = self._shape_of(tiles)
        count = len(tiles) * self.heads if tiles.split else 0
        kernel = self._attend(kind, rows, memory)
        return kernel(
            [queries, pool, pages, tiles.items, self._scale(scale), counters, written],
            [
                ("T", self.dtype),
                ("D", self.dim),
                ("REP", self.rep),
                ("PAGE", self.page),
                ("WINDOW", window),
                ("HEADS", self.heads),
                ("ROWS", rows),
            ],
            blocks=(len(tiles), self.heads),
            threads=threads,
            shapes=[queries.shape, (max(1, count * rows * self.dim),), (max(1, count * rows * 2),)],
            dtypes=[self.dtype, mx.float32, mx.float32],
        )[0]

    def _shape_of(self, tiles: Tiles) -> tuple[int, int, str, int]:
        """Packed rows a tile, threads, kind of kernel, bytes of shared memory."""
        if tiles.rows == MANY:
            return MANY, 256, "many", 4 * _MANY_TILE[self.dim] * self.dim * 2
        return tiles.rows, 128, "few", 4 * 4 * tiles.rows * (self.dim + 2)

    def _scale(self, scale: float) -> Any:
        """The factor of the scores, for powers of two, on the device."""
        if scale not in self._scales:
            self._scales[scale] = mx.array([scale * _LOG2_E], mx.float32)
        return self._scales[scale]

    def _attend(self, kind: str, rows: int, memory: int) -> Any:
        return self._attends.get((kind, rows)) or self._new_attend(kind, rows, memory)

    def _new_attend(self, kind: str, rows: int, memory: int) -> Any:
        tile = _MANY_TILE[self.dim] if kind == "many" else rows
        kernel = self._attends[kind, rows] = self.kernel(
            f"attend_{kind}",
            inputs=_ATTEND_INPUTS,
            outputs=["out", "partial", "scales"],
            header=self._header,
            source=_ATTEND_BODY.format(kind=kind, tile=tile),
            shared_memory=memory,
        )
        return kernel

    @cached_property
    def _attends(self) -> dict[tuple[str, int], Any]:
        return {}

    @cached_property
    def _header(self) -> str:
        return resources.files(__package__).joinpath("attention.cuh").read_text(encoding="utf-8")

    @cached_property
    def _write(self) -> CudaKernel:
        return self.kernel("write", ["k", "v", "pool", "slots", "count"], ["written"], _WRITE_BODY)

    @cached_property
    def _copy(self) -> CudaKernel:
        return self.kernel("copy_page", ["pool", "which"], ["written"], _COPY_BODY)
