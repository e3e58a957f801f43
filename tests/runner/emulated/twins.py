"""One layer's attention twice, on the same random rows: by the kernels' text and by NumPy."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tests.runner.backends import Driven, segment
from tests.runner.columns import blocks, sparse
from tests.support.cuda import ReferenceKernel, ReferenceKernels
from tests.support.emulated import EmulatedKernel, EmulatedKernels, host, shuffled
from treadle.runner.device.properties import DeviceProperties
from treadle.runner.forward.segments import RowSegment
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.kernels import Kernels
from treadle.runner.kv.paged.memory import uniform
from treadle.runner.kv.paged.paged_pass import PAGE

PEAKED, STEEP = 3.0, 100.0
"""What queries are times: so that one cached token too many or too few is seen; so that one token weighs everything."""
TOLERANCE = {mx.bfloat16: 0.03, mx.float16: 0.006}
_PAGES = 120


def close(found: Any, wanted: Any, tolerance: float) -> None:
    """Within `tolerance`, absolute and relative."""
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), np.array(wanted.astype(mx.float32)), atol=tolerance, rtol=tolerance
    )


def kernels_of(seed: int) -> type[EmulatedKernels]:
    """Kernels whose launches are shuffled as `seed` says, 0 for not at all."""
    return type("Shuffled", (EmulatedKernels,), {"kernel": shuffled(EmulatedKernel, seed)})


@dataclass(frozen=True)
class Attention:
    """A layer's attention: as `Kernels` has it, with its window and what of a chip it depends on."""

    dim: int
    dtype: Any
    heads: int
    rep: int
    window: int = 0
    bits: int = 16
    shared: int = 227
    value_dim: int = 0
    softcap: float = 0.0
    sinks: bool = False
    latent: bool = False
    wide: bool = False

    @property
    def chip(self) -> DeviceProperties:
        return DeviceProperties(processors=4, shared=self.shared * 1024)

    def layout(self, kernels: type[Kernels], dtype: Any, chip: DeviceProperties) -> Driven:
        made = kernels(
            self.heads,
            self.dim,
            PAGE,
            dtype,
            self.bits,
            rep=self.rep,
            chip=chip,
            value_dim=self.value_dim,
            softcap=self.softcap,
            sinks=self.sinks,
            latent=self.latent,
            wide=self.wide,
        )
        made.check_memory()
        return Driven(PagedConfig(uniform([self.window], made), None, pages=_PAGES, keep_prefixes=False))


class _Roomy(ReferenceKernel):
    """In float32 what a block holds takes twice the memory, and nothing needs it."""

    def __init__(self, *args: Any, shared_memory: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)


class Wide(ReferenceKernels):
    """The launches in NumPy, in float32 for any heads."""

    kernel = _Roomy


class Twins:
    """Rows in pages of both, with NaNs wherever no token was written. With `columns` tokens have positions with gaps,
    and some see those behind them."""

    def __init__(self, attention: Attention, dice: random.Random, *, seed: int = 0, columns: bool = False) -> None:
        self._attention = attention
        self._dice = dice if columns else None
        self._ends: dict[str, int] = {}
        self._numbers = np.random.default_rng(dice.randrange(1 << 30))
        self._real = attention.layout(kernels_of(seed), attention.dtype, attention.chip)
        self._plain = attention.layout(Wide, mx.float32, DeviceProperties(shared=2 * DeviceProperties().shared))
        self._lengths: dict[str, int] = {}
        (layer,) = self._real.backend.layers
        spoilt = layer.pool.data if layer.pool.scales is None else layer.pool.scales
        host(spoilt).view(np.uint8)[:] = 0xFF

    def step(self, counts: dict[str, int], *, scale: float = PEAKED) -> None:
        """Each row gains so many tokens, in one pass; check what they see."""
        segments = self._segments(counts)
        total = sum(len(one.tokens) for one in segments)
        heads, rep, dim = self._attention.heads, self._attention.rep, self._attention.dim
        keys, values = (self._random(total, heads, 1, one) for one in (dim, self._attention.value_dim or dim))
        queries = self._random(total, heads * rep, 1, dim, scale=scale)
        sinks = self._random(heads * rep, scale=3 * scale) if self._attention.sinks else None
        found, wanted = (
            _attended(rows, segments, [queries.astype(dtype), keys.astype(dtype), values.astype(dtype)], sinks)
            for rows, dtype in ((self._real, self._attention.dtype), (self._plain, mx.float32))
        )
        close(found, wanted, TOLERANCE[self._attention.dtype])
        self._check_counters()

    @property
    def rows(self) -> list[str]:
        return list(self._lengths)

    def release(self, row: str) -> None:
        del self._lengths[row]
        self._real.release(row)
        self._plain.release(row)

    def _segments(self, counts: dict[str, int]) -> list[RowSegment]:
        pieces = []
        for row, count in counts.items():
            if row not in self._lengths:
                self._real.admit(row)
                self._plain.admit(row)
            start = self._lengths.setdefault(row, 0)
            self._lengths[row] += count
            pieces.append(segment(row, (0,) * count, start, **self._columns(row, start, count)))
        return self._real.order(pieces)

    def _columns(self, row: str, start: int, count: int) -> dict[str, Any]:
        """Positions of a row's next tokens, and what some of them see."""
        if self._dice is None:
            return {}
        positions = sparse(self._dice, count, self._ends.get(row, -1) + 1)
        self._ends[row] = int(positions[-1])
        return {"positions": positions, "last_visible": blocks(self._dice, start, count)}

    def _random(self, *shape: int, scale: float = 1.0) -> Any:
        return mx.array(self._numbers.normal(0, scale, shape).astype(np.float32)).astype(self._attention.dtype)

    def _check_counters(self) -> None:
        (layer,) = self._real.backend.layers
        assert not any(host(counters).any() for counters in layer.step.counters)


def _attended(rows: Driven, segments: list[RowSegment], arrays: list[Any], sinks: Any | None) -> Any:
    queries, keys, values = arrays
    rows.begin(segments)
    (layer,) = rows.backend.layers
    scale, dim = queries.shape[-1] ** -0.5, values.shape[-1]
    if layer.kernels.latent:
        scale = 0.0625  # rounds nothing
        latents, _ = layer.update_and_fetch(keys[..., :dim], keys[..., dim:])
        return layer.attend_latent(queries[..., :dim], queries[..., dim:] * scale, latents, scale)
    layer.update_and_fetch(keys, values)
    return layer.attend(queries, keys, values, scale, 0, sinks, softcap=layer.kernels.softcap)
