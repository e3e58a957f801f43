"""What a model takes for a layer's cache, over pages that all rows share: attention by the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..mlxlm import Window
from ..programs import Programs
from ..uploads import Uploads
from .kernels import Kernels
from .pool import Pool
from .work import COUNT, COUNTERS, FIRST, PAGES, Segments, Tiles, few_tiles, is_few, many_tiles


@dataclass
class Pass:
    """What all layers share in a step. The first `few` tokens are of segments for one kernel, the rest for the other;
    `pages`, of these and of those, are where their rows are, and `slots` where all the tokens go, on the device.
    `compiled` are passes over these layers that were compiled."""

    positions: Any = None
    slots: Any = None
    pages: tuple[Any, Any] = (None, None)
    counters: tuple[Any, Any] = (None, None)
    compiled: Programs = field(default_factory=Programs)
    few: int = 0
    segments: Any = None
    tiles: dict[tuple[bool, int, int, int, int], Tiles] | None = None
    _uploads: Uploads = field(default_factory=Uploads)

    def begin(self, segments: Segments, rep: int, positions: npt.NDArray[np.int32], slots: Any, pages: Any) -> None:
        """The next step; `segments` begin with those of few rows."""
        if self.counters[0] is None:  # one for each kernel: they may run at the same time
            self.counters = (mx.zeros(COUNTERS, mx.int32), mx.zeros(COUNTERS, mx.int32))
            mx.eval(self.counters)
        self.segments = segments
        few = is_few(segments[:, COUNT], rep)
        self.few = int(segments[few, COUNT].sum())
        border = len(pages) if few.all() else int(segments[few.sum(), PAGES])
        segments[~few, PAGES] -= border
        parts = positions, slots, _padded(pages[border:]), _padded(pages[:border])
        self.positions, self.slots, *both = self._uploads.put(*parts)
        self.pages = both[0], both[1]
        self.tiles = {}

    def close(self) -> None:
        """Nothing more is computed; what is compiled holds the pools."""
        self.compiled.clear()
        self.counters = (None, None)

    def work(self, kernels: Kernels, window: int, *, few: bool) -> Tiles:
        """The step's tiles for layers of such heads, made once; tokens are counted from the first of their kind."""
        assert self.tiles is not None
        key = (few, kernels.rep, kernels.heads, kernels.dim, window)
        if key not in self.tiles:
            some = self.segments[is_few(self.segments[:, COUNT], kernels.rep) == few]
            some[:, FIRST] -= 0 if few else self.few
            heads = {"rep": kernels.rep, "heads": kernels.heads, "window": window}
            made = few_tiles(some, **heads) if few else many_tiles(some, **heads, dim=kernels.dim)
            self.tiles[key] = replace(made, items=self._uploads.put(_padded(made.items))[0])
        return self.tiles[key]


class PagedLayer:
    """One layer: its `pool` and its `window`, 0 where it sees everything."""

    def __init__(self, pool: Pool, window: int, step: Pass, kernels: Kernels) -> None:
        self.pool = pool
        self.written: Any = None
        self.step = step
        self.window = window
        self.kernels = kernels

    @property
    def offset(self) -> Any:
        """Positions (T,) of the pass's tokens."""
        return self.step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask: the kernels know who sees what, but for a window that only the model knows of."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Put `keys` and `values` (T, kv heads, 1, D) where they belong."""
        step = self.step
        self.written = self.kernels.write(self.pool, keys, values, step.slots)
        return keys, values

    def attend(self, queries: Any, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (T, query heads, 1, D) of `queries` of that shape over each token's own row up to itself."""
        if sinks is not None:
            raise NotImplementedError("the kernels know no attention sinks")
        window = min(filter(None, (window, self.window)), default=0)
        few = self.step.few
        if few == 0 or few == queries.shape[0]:
            return self._attend(queries, window, scale, few=few > 0)
        parts = [self._attend(queries[:few], window, scale, few=True)]
        parts.append(self._attend(queries[few:], window, scale, few=False))
        return mx.concatenate(parts)

    def attend_written(self, queries: Any, scale: float) -> Any:
        """Like `attend`, where what made `queries` has put keys and values where they belong."""
        self.written = self.step.slots
        try:
            return self.attend(queries, scale, 0, None)
        finally:
            self.written = None

    def _attend(self, queries: Any, window: int, scale: float, *, few: bool) -> Any:
        kernels, step = self.kernels, self.step
        tiles = step.work(kernels, window, few=few)
        return kernels.attend(
            queries, self.pool, tiles, step.pages[few], step.counters[few], self.written, scale=scale, window=window
        )


def _padded(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`array` (n, ...) with zeros behind it, so that it comes in few sizes: a tile of zeros has no rows."""
    size = max(64, 1 << (len(array) - 1).bit_length())
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), np.int32)])
