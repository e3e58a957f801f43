"""What a model takes for a layer's cache, over pages that all rows share: attention by the kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...device.staging import Staging
from ...forward.compiled import CompiledPasses
from ...mlxlm import Window
from .kernels import Kernels
from .pool import Pool
from .tiling import COUNT, COUNTERS, FIRST, PAGES, Segments, Tiles, few_tiles, is_few, many_tiles

_LEAST_PAGES = 4096
"""Pages that a step names at least: each length is another program."""
_LEAST_SMALL = 64
"""Where they are made plain for prompts, and nothing is compiled."""
_BLOCKS = 512
"""Blocks of a launch for many rows at least: those without work cost nearly nothing, as they all run at once."""


@dataclass
class Pass:
    """What all layers share in a step. The first `few` of `count` tokens are of segments for one kernel, the rest for
    the other, or of nobody; `pages`, of these and of those, are where their rows are, and `slots` where all the tokens
    go, on the device. `tiles` are, by whether they are for few and by their window, for layers of `kernels`' heads.
    `compiled` are passes over these layers that were compiled."""

    kernels: Kernels
    positions: Any = None
    slots: Any = None
    pages: tuple[Any, Any] = (None, None)
    counters: tuple[Any, Any] = (None, None)
    compiled: CompiledPasses = field(default_factory=CompiledPasses)
    count: int = 0
    few: int = 0
    segments: dict[bool, Segments] = field(default_factory=dict)
    tiles: dict[tuple[bool, int], Tiles] = field(default_factory=dict)
    windows: set[int] = field(default_factory=set)
    _uploads: Staging = field(default_factory=Staging)

    def begin(self, segments: Segments, positions: npt.NDArray[np.int32], slots: Any, pages: Any) -> None:
        """The next step; `segments` begin with those of few rows."""
        if self.counters[0] is None:  # one for each kernel: they may run at the same time
            self.counters = (mx.zeros(COUNTERS, mx.int32), mx.zeros(COUNTERS, mx.int32))
            mx.eval(self.counters)
        some = int(np.count_nonzero(is_few(segments[:, COUNT], self.kernels.rep)))
        short, long = segments[:some], segments[some:]
        self.count = len(positions)
        self.few, border = (int(long[0, FIRST]), int(long[0, PAGES])) if len(long) else (self.count, len(pages))
        long[:, PAGES] -= border
        long[:, FIRST] -= self.few
        self.segments = {kind: of for kind, of in ((True, short), (False, long)) if len(of)}
        made = {(kind, window): self._cut(window, few=kind) for kind in self.segments for window in self.windows}
        least = _LEAST_SMALL if self.kernels.int8 else _LEAST_PAGES
        both = [_padded(pages[border:], least), _padded(pages[:border], _LEAST_PAGES)]
        self.positions, self.slots, *rest = self._uploads.put(
            positions, slots, *both, *(tiles.items for tiles in made.values())
        )
        self.pages = rest[0], rest[1]
        self.tiles = {
            key: replace(tiles, items=items) for (key, tiles), items in zip(made.items(), rest[2:], strict=True)
        }

    def put(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        """Numbers that a step needs, on the device."""
        return self._uploads.put(*arrays)

    def close(self) -> None:
        """Nothing more is computed; what is compiled holds the pools."""
        self.compiled.clear()
        self.positions = self.slots = None
        self.pages = self.counters = (None, None)
        self.tiles = {}
        self._uploads = Staging()

    def work(self, window: int, *, few: bool) -> Tiles:
        """The step's tiles, made once; tokens are counted from the first of their kind. Those of a window that was
        asked for before are made when a step begins, and come to the device with all that it needs."""
        if (few, window) not in self.tiles:
            self.windows.add(window)
            made = self._cut(window, few=few)
            self.tiles[few, window] = replace(made, items=self._uploads.put(made.items)[0])
        return self.tiles[few, window]

    def _cut(self, window: int, *, few: bool) -> Tiles:
        kernels, some = self.kernels, self.segments[few]
        if few:
            made = few_tiles(some, rep=kernels.rep, heads=kernels.heads, window=window)
            most = (made.blocks + 8) // 8 + made.blocks + self.few  # however the rows are cut
            return replace(made, items=_padded(made.items, 1 << (most - 1).bit_length()))
        made = many_tiles(some, rep=kernels.rep, heads=kernels.heads, window=window, dim=kernels.dim)
        items = _padded(made.items, _BLOCKS // kernels.heads)
        blocks, room = len(items), 2 * _BLOCKS // kernels.heads  # for parts, also where no tile is split
        return replace(made, items=items, blocks=blocks, parts=room if blocks <= room else blocks if made.parts else 0)

    def attend(self, queries: Any, pool: Pool, written: Any, *, window: int, scale: float) -> Any:
        """Attention (T, query heads, 1, D) of all the step's `queries` of that shape over what is in `pool`, where
        `written` says that it is there."""
        if self.few in (0, self.count):
            return self._attend(queries, pool, written, window, scale, few=self.few > 0)
        parts = [self._attend(queries[: self.few], pool, written, window, scale, few=True)]
        parts.append(self._attend(queries[self.few :], pool, written, window, scale, few=False))
        return mx.concatenate(parts)

    def _attend(self, queries: Any, pool: Pool, written: Any, window: int, scale: float, *, few: bool) -> Any:
        tiles = self.work(window, few=few)
        return self.kernels.attend(
            queries, pool, tiles, self.pages[few], self.counters[few], written, scale=scale, window=window
        )

    # Programs ----------------------------------------------------------------------------------------------------

    def inputs(self, windows: Sequence[int]) -> tuple[Hashable, list[Any]]:
        """For a program of a step for layers with `windows`: all that is constant in it, and the arrays that it is
        given each time."""
        keys = self._keys(windows)
        tiles = [self.work(window, few=few) for few, window in keys]
        shapes = [(of.rows, of.blocks, of.parts, of.items.shape) for of in tiles]
        constants = (self.count, self.few, self.pages[0].shape, self.pages[1].shape, *keys, *shapes)
        return constants, [self.positions, self.slots, *self.pages, *(of.items for of in tiles)]

    def template(self, windows: Sequence[int]) -> Pass:
        """The step without its arrays: with others it is a step that has the same constants."""
        bare = {key: replace(self.tiles[key], items=None) for key in self._keys(windows)}
        return replace(self, positions=None, slots=None, pages=(None, None), segments={}, tiles=bare)

    def filled(self, arrays: Sequence[Any]) -> Pass:
        """The template with `arrays` as `inputs` gives them."""
        positions, slots, many, few, *items = arrays
        tiles = {key: replace(of, items=one) for (key, of), one in zip(self.tiles.items(), items, strict=True)}
        return replace(self, positions=positions, slots=slots, pages=(many, few), tiles=tiles)

    def _keys(self, windows: Sequence[int]) -> list[tuple[bool, int]]:
        return [(few, window) for few in self.segments for window in windows]


class PagedLayer:
    """One layer: its `pool` and its `window`, 0 where it sees everything."""

    def __init__(self, pool: Pool, window: int, step: Pass) -> None:
        self.pool = pool
        self.written: Any = None
        self.step = step
        self.window = window

    @property
    def offset(self) -> Any:
        """Positions (T,) of the pass's tokens."""
        return self.step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask: the kernels know who sees what, but for a window that only the model knows of."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Put `keys` and `values` (T, kv heads, 1, D) where they belong."""
        self.written = self.step.kernels.write(self.pool, keys, values, self.step.slots)
        return keys, values

    def attend(self, queries: Any, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (T, query heads, 1, D) of `queries` of that shape over each token's own row up to itself."""
        if sinks is not None:
            raise NotImplementedError("the kernels know no attention sinks")
        window = min(filter(None, (window, self.window)), default=0)
        return self.step.attend(queries, self.pool, self.written, window=window, scale=scale)


def _padded(array: npt.NDArray[np.int32], least: int) -> npt.NDArray[np.int32]:
    """`array` (n, ...) with zeros behind it, so that it comes in few sizes from `least` on: a tile of zeros has no
    rows."""
    size = max(least, 1 << (len(array) - 1).bit_length())
    padded = np.zeros((size, *array.shape[1:]), np.int32)
    padded[: len(array)] = array
    return padded
