"""CUDA kernels for attention over the pages of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from ...device.cuda import CudaKernel, bits_of
from ...device.properties import DeviceProperties
from ..backend import Unsupported
from .attention_text import AttentionText
from .pool import Pool, PoolKernels
from .tiling import (
    COUNT,
    DECODE_ROWS,
    PREFILL_ROWS,
    TILE,
    WIDE_ROWS,
    Segments,
    Tiles,
    Visible,
    decode_tiles,
    in_few_sizes,
    padded,
    prefill_tiles,
    wide_tiles,
)

_WIDTHS = (64, 128, 256)
"""Dimensions of a row in shared memory: those of a head, padded. Wider heads go to the wide kernel."""
_WIDEST = (576, 512)
"""Dimensions of keys and of values in the wide kernel, at most."""
_LOG2_E = 1.4426950408889634
_PREFILL_TILES = (64, 16)
"""Cached tokens that a block of the prefill kernel reads together, by the shared memory there is."""
_RINGS = ((4, 5), (4, 4), (4, 3), (4, 2), (2, 2))
"""Warps of a block of the decode kernel and depths of a warp's ring of tiles, best first."""
_WIDE_WAYS = ((32, 4, 2), (16, 4, 2)), ((64, 8, 2), (32, 8, 2), (16, 8, 2))
"""Cached tokens that a block of the wide kernel reads together, its warps, and tiles of its ring: where two blocks
share a multiprocessor, and where one has it."""
_FEW_WARPS = 4
_DECODE_WIDE = WIDE_ROWS[1]
"""The most packed rows of a short segment in the wide kernel."""
_STATIC, _FLAGS, _WIDE_STATIC = 1024, 272, 128
"""Bytes of a block's shared memory that the device or a kernel reserves, those that the decode kernel does, and those
that the wide kernel does."""


@dataclass(frozen=True)
class AttentionShape:
    """A layer's attention: kv heads, query heads, dimensions of keys and of values, and their type.

    `value_dim` 0 stands for that of keys. With `sinks` a learned logit of each query head is in its softmax; `softcap`
    (0: none) bounds the scores. Keys of a `latent` layer hold the values in their first dimensions.
    """

    heads: int
    query_heads: int
    dim: int
    dtype: Any
    value_dim: int = 0
    sinks: bool = False
    softcap: float = 0.0
    latent: bool = False

    @property
    def widest(self) -> tuple[int, int]:
        """Dimensions of keys and of values."""
        return self.dim, self.value_dim or self.dim

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.query_heads // self.heads


@dataclass
class Kernels(PoolKernels):
    """Attention over such pools, with `rep` query heads for each kv head, on a device like `chip`.

    With `sinks` each softmax has its head's sink in it; scores are capped at `softcap` (0: not). Heads with keys or
    values of more than 256 dimensions, and latent ones, go to the `wide` kernel; others do where it is asked for.
    `wide_way` are the cached tokens that its blocks read together, their warps, and tiles of their ring (None: by the
    memory there is).
    """

    rep: int = 1
    chip: DeviceProperties = field(default_factory=DeviceProperties)
    sinks: bool = field(default=False, kw_only=True)
    softcap: float = field(default=0.0, kw_only=True)
    wide: bool = field(default=False, kw_only=True)
    wide_way: tuple[int, int, int] | None = field(default=None, kw_only=True)
    _partial: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict, repr=False, kw_only=True)
    _made: dict[tuple[str, int, bool, bool], CudaKernel] = field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wide = self.wide or _is_wide(self.dim, self.value_dim, self.latent)

    @classmethod
    def of(cls, shape: AttentionShape, page: int, bits: int, chip: DeviceProperties) -> Kernels:
        """The kernels for layers of `shape`. Raises Unsupported where these can't compute such attention, or a block
        of the device has too little shared memory for them."""
        cls.check(shape, bits)
        made = cls(
            shape.heads,
            shape.dim,
            page,
            shape.dtype,
            bits,
            rep=shape.group,
            chip=chip,
            value_dim=shape.value_dim,
            latent=shape.latent,
            sinks=shape.sinks,
            softcap=shape.softcap,
        )
        made.check_memory()
        return made

    @classmethod
    def check(cls, shape: AttentionShape, bits: int = 16) -> None:
        """Raise Unsupported where these kernels can't compute such attention over keys and values of `bits` bits."""
        for reason in _reasons_against(shape, bits):
            raise Unsupported(reason)
        if shape.dtype not in cls.dtypes:
            raise Unsupported(f"attention kernels compute in bfloat16 and float16, not in {shape.dtype}")

    # Plans -------------------------------------------------------------------------------------------------------

    @property
    def short(self) -> int:
        """The most tokens of a segment that is planned as one that decodes; 0 where all are planned as prompts."""
        return (_DECODE_WIDE if self.wide else DECODE_ROWS[-1]) // self.rep

    def plan(
        self, segments: Segments, tokens: int, *, decode: bool, window: int = 0, visible: Visible | None = None
    ) -> Tiles:
        """Tiles of `segments`, all of which are short (`decode`) or none, with items padded to one of few sizes. There
        are `tokens` tokens in all short segments. Tokens see a `window`, or the cached tokens that are `visible`."""
        way: dict[str, Any] = {"rep": self.rep, "heads": self.heads, "window": window, "visible": visible}
        if self.wide:
            rows = self._decode_rows(segments) if decode else self._most_rows
            each = 2 if self._wide_way(rows)[1] == _FEW_WARPS else 1
            return in_few_sizes(wide_tiles(segments, rows=rows, each=each, **way), self.heads)
        if not decode:
            return in_few_sizes(prefill_tiles(segments, dim=max(self._dims), **way), self.heads)
        made = decode_tiles(segments, **way)
        most = (made.blocks + 8) // 8 + made.blocks + tokens  # however the segments are split
        return replace(made, items=padded(made.items, 1 << (most - 1).bit_length()))

    def _decode_rows(self, segments: Segments) -> int:
        most = int(segments[:, COUNT].max()) * self.rep
        return next(rows for rows in WIDE_ROWS if most <= rows)

    # Launches ----------------------------------------------------------------------------------------------------

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
        sinks: Any | None = None,
        rotated: Any | None = None,
        leading: Any | None = None,
    ) -> Any:
        """Attention (T, query heads, 1, DV) of `queries` (T, query heads, 1, D) over the pool's `pages` (int32, the
        page tables of all sequences one after the other), as `tiles` says. `window` is 0 for none; `sinks` are one
        logit for each query head. `counters` are zeros, and are again afterwards: at least as many as partial results
        times kv heads. Over latents, `queries` have DV dimensions, and the rest is `rotated`, multiplied by `scale`
        already. What an earlier launch left for other tokens, `leading` (L, query heads, 1, DV), comes first in the
        result (L + T, query heads, 1, DV): `tiles` are of segments that are not short then."""
        assert (sinks is not None) == self.sinks
        assert (rotated is not None) == self.latent
        if pool.scales is not None and tiles.rows == PREFILL_ROWS:  # many rows read the same pages again and again
            pool, written = self.dequantize(pool, pages, written, queries)
            pages = mx.arange(pages.shape[0], dtype=mx.int32)
        kernel, template, threads = self._launch(tiles, pool, follows=leading is not None)
        kv_scales = counters if pool.scales is None else pool.scales
        inputs = [queries, pool.data, kv_scales, pages, tiles.items, counters, written, *self._partial_results(tiles)]
        if rotated is not None:
            inputs.append(rotated)
        if sinks is not None:
            inputs.append(sinks if sinks.dtype == self.dtype else sinks.astype(self.dtype))
        if tiles.visible is not None:
            inputs.append(tiles.visible)
            window = 0  # it is in what is visible
        count = queries.shape[0]
        if leading is not None:
            inputs.append(leading)
            count += leading.shape[0]
        return kernel(
            inputs,
            [*self._attention, ("WINDOW", window), ("ROWS", tiles.rows), *self._scale(scale), *template],
            blocks=(tiles.blocks, self.heads),
            threads=threads,
            shapes=[(count, *queries.shape[1:-1], self.value_dim)],
            dtypes=[self.dtype],
        )[0]

    @cached_property
    def _attention(self) -> list[tuple[str, Any]]:
        """The arguments of all kernels."""
        return [
            ("T", self.dtype),
            ("D", self.dim),
            ("DV", self.value_dim),
            ("REP", self.rep),
            ("PAGE", self.page),
            ("HEADS", self.heads),
            ("SINKS", self.sinks),
        ]

    def _scale(self, scale: float) -> list[tuple[str, int]]:
        if self.latent:
            return [("SCALE", bits_of(scale)), ("CAP", 0)]
        if not self.softcap:
            return [("SCALE", bits_of(scale * _LOG2_E)), ("CAP", 0)]
        return [("SCALE", bits_of(scale / self.softcap)), ("CAP", bits_of(self.softcap * _LOG2_E))]

    def _launch(self, tiles: Tiles, pool: Pool, *, follows: bool) -> tuple[CudaKernel, list[tuple[str, Any]], int]:
        """The kernel for such tiles, its own arguments, and threads of a block."""
        rows, bounded = tiles.rows, tiles.visible is not None
        if self.wide:
            tile, warps, stages = self._wide_way(rows)
            own = [("TILE", tile), ("WARPS", warps), ("STAGES", stages), ("LATENT", self.latent)]
            return self._kernel("attend_wide", rows, bounded, follows), own, 32 * warps
        if rows != PREFILL_ROWS:
            assert not follows
            warps, stages = self._ring
            own = [("S", pool.data.dtype), ("STAGES", stages), ("WARPS", warps)]
            return self._kernel("attend_decode", 0, bounded), own, 32 * warps
        return (
            self._kernel("attend_prefill", 0, bounded, follows),
            [("TILE", self._tile)],
            128 if max(self._dims) <= 128 else 256,
        )

    def close(self) -> None:
        super().close()
        self._partial.clear()

    def _partial_results(self, tiles: Tiles) -> tuple[Any, Any]:
        """Memory for partial results of split tiles, and for their scales; launches with as many parts use it in turn.
        New arrays cost the host 2 us each, and are all kept until a pass has ended."""
        key = tiles.rows, tiles.parts
        if key not in self._partial:
            rows = tiles.parts * self.heads * tiles.rows
            self._partial[key] = mx.zeros(max(1, rows * self.value_dim)), mx.zeros(max(1, rows * 2))
            mx.eval(self._partial[key])
        return self._partial[key]

    # Shared memory -----------------------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Raise Unsupported where a block of the device has too little shared memory for the kernels."""
        needs = self._wide_memory(_DECODE_WIDE, *_WIDE_WAYS[1][-1])
        if not self.wide:
            decode = 0 if not self.short else self._decode_memory(*_RINGS[-1])
            needs = max(decode, self._prefill_memory(_PREFILL_TILES[-1]))
        if needs + _STATIC > self.chip.shared:
            raise Unsupported(
                f"heads of {self.dim} dimensions take {needs} bytes of shared memory, and {self.chip.shared} are there"
            )

    @property
    def _dims(self) -> tuple[int, int]:
        return self.dim, self.value_dim

    @cached_property
    def _ring(self) -> tuple[int, int]:
        """Warps and stages of the decode kernel: the deepest ring with which two blocks share a multiprocessor, or one
        block where two can't."""
        available = (self.chip.shared + _STATIC) // 2 - _STATIC - _FLAGS
        twice = (ring for ring in _RINGS if ring[0] == _RINGS[0][0] and self._decode_memory(*ring) <= available)
        once = (ring for ring in _RINGS if self._decode_memory(*ring) + _STATIC <= self.chip.shared)
        return next(twice, None) or next(once)

    @cached_property
    def _tile(self) -> int:
        return next(tile for tile in _PREFILL_TILES if self._prefill_memory(tile) + _STATIC <= self.chip.shared)

    def _decode_memory(self, warps: int, stages: int) -> int:
        """Bytes of shared memory: a ring of tiles for each warp, and its sums."""
        line = sum(_widths(self._dims)) + 8 if self.int8 else sum(_widths(self._dims)) * int(self.dtype.size)
        return warps * (stages * TILE * line + 8 * (self.value_dim + 4) * 4)

    def _prefill_memory(self, tile: int) -> int:
        """Bytes of shared memory: queries, and two tiles of keys and of values."""
        keys, values = _widths(self._dims)
        return (PREFILL_ROWS * keys + 2 * tile * (keys + values)) * int(self.dtype.size)

    def _wide_memory(self, rows: int, tile: int, warps: int, stages: int) -> int:
        """Bytes of shared memory: queries, tiles of keys and of values, weights, and a few numbers of each row."""
        size = int(self.dtype.size)
        keys, values = (-(-dim // 64) * 64 * size for dim in self._dims)
        each = max(1, rows // 16 * (tile // 8) // warps)  # of the score's pieces of 16 x 8
        across = tile // 8 // (each if each < 4 else each // 2)
        of_tokens = stages * tile * (keys + (0 if self.latent else values))
        return rows * keys + of_tokens + rows * (tile * 2 + 16) + rows * 4 * (across + 2)

    def _wide_way(self, rows: int) -> tuple[int, int, int]:
        """Cached tokens, warps and stages of the wide kernel's blocks for tiles of so many rows."""
        asked = self.wide_way
        if asked is not None and self._fits(rows, asked, 2 if asked[1] == _FEW_WARPS else 1):
            return asked
        return next(self._ways_that_fit(rows))

    def _ways_that_fit(self, rows: int) -> Iterator[tuple[int, int, int]]:
        for blocks, ways in zip((2, 1), _WIDE_WAYS, strict=True):
            yield from (way for way in ways if self._fits(rows, way, blocks))

    def _fits(self, rows: int, way: tuple[int, int, int], blocks: int) -> bool:
        """Whether so many blocks fit on a multiprocessor."""
        needs = blocks * (self._wide_memory(rows, *way) + _WIDE_STATIC + _STATIC)
        registers = blocks == 1 or rows < WIDE_ROWS[-1]  # four warps have none for more
        return registers and needs <= self.chip.shared + _STATIC

    @cached_property
    def _most_rows(self) -> int:
        """Rows of a tile of segments that do not decode: the most that read at least half as many cached tokens."""
        ways = {rows: next(self._ways_that_fit(rows), (0, 0, 0)) for rows in WIDE_ROWS}
        return max(rows for rows, (tile, *_) in ways.items() if 2 * tile >= min(rows, 32))

    # Kernels -----------------------------------------------------------------------------------------------------

    def _kernel(self, name: str, rows: int, bounded: bool, follows: bool = False) -> CudaKernel:
        """The kernel `name`, for tiles of `rows` (0: any); `bounded` where tokens say which cached ones they see. With
        `follows` it takes what an earlier launch left."""
        key = name, rows, bounded, follows
        if key not in self._made:
            body = AttentionText(name, latent=self.latent, sinks=self.sinks, bounded=bounded, follows=follows)
            memory = self._memory(name, rows)
            self._made[key] = self.kernel(
                name, body.inputs, ["out"], body.source, files=body.files, shared_memory=memory
            )
        return self._made[key]

    def _memory(self, name: str, rows: int) -> int:
        if name == "attend_wide":
            return self._wide_memory(rows, *self._wide_way(rows))
        return self._decode_memory(*self._ring) if name == "attend_decode" else self._prefill_memory(self._tile)


def _is_wide(dim: int, value_dim: int, latent: bool) -> bool:
    return latent or max(dim, value_dim) > _WIDTHS[-1]


def _widths(dims: tuple[int, int]) -> list[int]:
    """Dimensions of rows in shared memory."""
    return [next(width for width in _WIDTHS if dim <= width) for dim in dims]


def _reasons_against(shape: AttentionShape, bits: int) -> Iterator[str]:
    keys, values = shape.widest
    wide = _is_wide(keys, values, shape.latent)
    if not wide and (keys % 16 or values % 16):
        yield f"attention kernels take heads of multiples of 16 dimensions, not of {keys} and {values}"
    if wide and (keys % 32 or values % 128 or keys > _WIDEST[0] or values > _WIDEST[1]):
        yield (
            f"attention kernels take wide keys of multiples of 32 dimensions, {_WIDEST[0]} at most, and values of "
            f"multiples of 128, {_WIDEST[1]} at most, not of {keys} and {values}"
        )
    if shape.latent and shape.softcap:
        yield "scores of latents are not capped"
    if shape.query_heads % shape.heads:
        yield f"{shape.query_heads} query heads can't share {shape.heads} kv heads evenly"
    if bits == 8 and wide:
        yield f"keys of {keys} dimensions are not stored in 8 bits"
    if bits == 8 and shape.group > DECODE_ROWS[-1]:
        yield f"{shape.group} query heads share a kv head, and of 8 bits {DECODE_ROWS[-1]} at most may"
