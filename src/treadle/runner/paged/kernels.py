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
from .work import FEW, MANY, TILE, Tiles

HEAD_DIMS = (64, 128, 256)
_LOG2_E = 1.4426950408889634
_MANY_TILE = {64: 64, 128: 64, 256: 32}
_ATTEND_INPUTS = ["q", "pool", "pages", "items", "scale", "counters", "written"]
_FEW_BODY = """
  treadle::attend_few<T, T, D, REP, PAGE, WINDOW, ROWS>(
      q, pool, nullptr, pages, items + (gridDim.x + 8) / 8 * 8, items, scale, out, partial, scales,
      const_cast<int*>(counters), HEADS);
"""
_MANY_BODY = """
  treadle::attend_many<T, D, REP, PAGE, WINDOW, TILE>(
      q, pool, pages, items, scale, out, partial, scales, const_cast<int*>(counters), HEADS);
"""
_FEW_WARPS = 4
_FEW_RING = {128: 5, 256: 3, 512: 2}
"""By bytes of a token: tiles in a warp's ring, as `few_stages` in the kernels' text has it."""
_WRITE_BODY = """
  constexpr int CHUNKS = D / 8;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 0) written[0] = 0;
  const int chunk = i % CHUNKS, h = i / CHUNKS % HEADS, token = i / (CHUNKS * HEADS);
  if (token >= slots_shape[0]) return;
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

    def write(self, pool: Any, keys: Any, values: Any, slots: Any) -> Any:
        """Put `keys` and `values` (T, kv heads, 1, D) at `slots` (T,) of the pool. What comes back says to `attend` that
        it is done."""
        return self._write(
            [keys, values, pool, slots],
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
        few = tiles.rows != MANY
        parts = tiles.parts * self.heads * tiles.rows
        return (self._few if few else self._many)(
            [queries, pool, pages, tiles.items, self._scale(scale), counters, written],
            [
                ("T", self.dtype),
                ("D", self.dim),
                ("REP", self.rep),
                ("PAGE", self.page),
                ("WINDOW", window),
                ("HEADS", self.heads),
                ("ROWS", tiles.rows),
                *([] if few else [("TILE", _MANY_TILE[self.dim])]),
            ],
            blocks=(tiles.blocks, self.heads),
            threads=32 * _FEW_WARPS if few else 256,
            shapes=[queries.shape, (max(1, parts * self.dim),), (max(1, parts * 2),)],
            dtypes=[self.dtype, mx.float32, mx.float32],
        )[0]

    def _scale(self, scale: float) -> Any:
        """The factor of the scores, for powers of two, on the device."""
        if scale not in self._scales:
            self._scales[scale] = mx.array([scale * _LOG2_E], mx.float32)
        return self._scales[scale]

    @cached_property
    def _few(self) -> Any:
        line = self.dim * self.dtype.size
        ring, sums = 2 * TILE * line * _FEW_RING[line], 8 * (self.dim + 4) * 4
        return self._attend("few", _FEW_BODY, _FEW_WARPS * (ring + sums))

    @cached_property
    def _many(self) -> Any:
        return self._attend("many", _MANY_BODY, 4 * _MANY_TILE[self.dim] * self.dim * 2)

    def _attend(self, kind: str, body: str, memory: int) -> Any:
        return self.kernel(
            f"attend_{kind}",
            _ATTEND_INPUTS,
            ["out", "partial", "scales"],
            body,
            header=self._header,
            shared_memory=memory,
        )

    @cached_property
    def _header(self) -> str:
        return resources.files(__package__).joinpath("attention.cuh").read_text(encoding="utf-8")

    @cached_property
    def _write(self) -> CudaKernel:
        return self.kernel("write", ["k", "v", "pool", "slots"], ["written"], _WRITE_BODY)

    @cached_property
    def _copy(self) -> CudaKernel:
        return self.kernel("copy_page", ["pool", "which"], ["written"], _COPY_BODY)
