"""Layer caches of the paged backend: attention over shared pages by CUDA kernels."""

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
from .tiling import COUNT, COUNTERS, FIRST, PAGES, Segments, Tiles, decode_tiles, is_short, prefill_tiles

_LEAST_PAGES = 4096
"""The least length of a step's page table: each length is another compiled pass."""
_LEAST_DEQUANTIZED = 64
"""The same where pages are dequantized for prompts, and nothing is compiled."""
_BLOCKS = 512
"""The least blocks of a prefill launch. Those without work cost nearly nothing, as they all run at once."""


@dataclass
class PagedPass:
    """A step's data that all layers share.

    Tokens [0, decode_tokens) of `count` belong to the decode kernel, the rest to the prefill kernel; padding belongs to
    neither. `pages` are the page tables for prefill and decode, and `slots` the places in the pool that tokens are
    written to, on the device. `tiles` are the attention kernels' work, by (decode, window). `compiled` caches passes
    over these layers.
    """

    kernels: Kernels
    positions: Any = None
    slots: Any = None
    pages: tuple[Any, Any] = (None, None)
    counters: tuple[Any, Any] = (None, None)
    compiled: CompiledPasses = field(default_factory=CompiledPasses)
    count: int = 0
    decode_tokens: int = 0
    segments: dict[bool, Segments] = field(default_factory=dict)
    tiles: dict[tuple[bool, int], Tiles] = field(default_factory=dict)
    windows: set[int] = field(default_factory=set)
    _staging: Staging = field(default_factory=Staging)

    def begin(self, segments: Segments, positions: npt.NDArray[np.int32], slots: Any, pages: Any) -> None:
        """Start the next step; `segments` begin with the short ones."""
        if self.counters[0] is None:  # one for each kernel: they may run at the same time
            self.counters = (mx.zeros(COUNTERS, mx.int32), mx.zeros(COUNTERS, mx.int32))
            mx.eval(self.counters)
        count = int(np.count_nonzero(is_short(segments[:, COUNT], self.kernels.rep)))
        short, long = segments[:count], segments[count:]
        self.count = len(positions)
        self.decode_tokens, border = (
            (int(long[0, FIRST]), int(long[0, PAGES])) if len(long) else (self.count, len(pages))
        )
        long[:, PAGES] -= border
        long[:, FIRST] -= self.decode_tokens
        self.segments = {kind: of for kind, of in ((True, short), (False, long)) if len(of)}
        made = {(kind, window): self._plan(window, decode=kind) for kind in self.segments for window in self.windows}
        least = _LEAST_DEQUANTIZED if self.kernels.int8 else _LEAST_PAGES
        both = [_padded(pages[border:], least), _padded(pages[:border], _LEAST_PAGES)]
        self.positions, self.slots, *rest = self._staging.put(
            positions, slots, *both, *(tiles.items for tiles in made.values())
        )
        self.pages = rest[0], rest[1]
        self.tiles = {
            key: replace(tiles, items=items) for (key, tiles), items in zip(made.items(), rest[2:], strict=True)
        }

    def put(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        """Arrays of a step, on the device."""
        return self._staging.put(*arrays)

    def close(self) -> None:
        """Drop everything: compiled passes hold the pools."""
        self.compiled.clear()
        self.positions = self.slots = None
        self.pages = self.counters = (None, None)
        self.tiles = {}
        self._staging = Staging()

    def tiles_of(self, window: int, *, decode: bool) -> Tiles:
        """The step's tiles, made once; tokens are counted from the first of their kind. Those of a window that an
        earlier step asked for are made when a step begins, and staged with its other arrays."""
        if (decode, window) not in self.tiles:
            self.windows.add(window)
            made = self._plan(window, decode=decode)
            self.tiles[decode, window] = replace(made, items=self._staging.put(made.items)[0])
        return self.tiles[decode, window]

    def _plan(self, window: int, *, decode: bool) -> Tiles:
        kernels, some = self.kernels, self.segments[decode]
        if decode:
            made = decode_tiles(some, rep=kernels.rep, heads=kernels.heads, window=window)
            most = (made.blocks + 8) // 8 + made.blocks + self.decode_tokens  # however the segments are split
            return replace(made, items=_padded(made.items, 1 << (most - 1).bit_length()))
        made = prefill_tiles(some, rep=kernels.rep, heads=kernels.heads, window=window, dim=kernels.dim)
        items = _padded(made.items, _BLOCKS // kernels.heads)
        blocks, room = len(items), 2 * _BLOCKS // kernels.heads  # for partial results, also where no tile is split
        return replace(made, items=items, blocks=blocks, parts=room if blocks <= room else blocks if made.parts else 0)

    def attend(self, queries: Any, pool: Pool, written: Any, *, window: int, scale: float) -> Any:
        """Attention (T, query heads, 1, D) of all the step's `queries` of that shape over `pool`; `written` is the
        token that `PoolKernels.write` returned."""
        if self.decode_tokens in (0, self.count):
            return self._attend(queries, pool, written, window, scale, decode=self.decode_tokens > 0)
        parts = [self._attend(queries[: self.decode_tokens], pool, written, window, scale, decode=True)]
        parts.append(self._attend(queries[self.decode_tokens :], pool, written, window, scale, decode=False))
        return mx.concatenate(parts)

    def _attend(self, queries: Any, pool: Pool, written: Any, window: int, scale: float, *, decode: bool) -> Any:
        tiles = self.tiles_of(window, decode=decode)
        return self.kernels.attend(
            queries, pool, tiles, self.pages[decode], self.counters[decode], written, scale=scale, window=window
        )

    # Compiled passes -----------------------------------------------------------------------------------------------

    def inputs(self, windows: Sequence[int]) -> tuple[Hashable, list[Any]]:
        """The constants of a compiled pass for layers with `windows`, and the arrays that it takes each time."""
        keys = self._keys(windows)
        tiles = [self.tiles_of(window, decode=decode) for decode, window in keys]
        shapes = [(of.rows, of.blocks, of.parts, of.items.shape) for of in tiles]
        constants = (self.count, self.decode_tokens, self.pages[0].shape, self.pages[1].shape, *keys, *shapes)
        return constants, [self.positions, self.slots, *self.pages, *(of.items for of in tiles)]

    def template(self, windows: Sequence[int]) -> PagedPass:
        """The step without its arrays: with other arrays, it is a step with the same constants."""
        bare = {key: replace(self.tiles[key], items=None) for key in self._keys(windows)}
        return replace(self, positions=None, slots=None, pages=(None, None), segments={}, tiles=bare)

    def filled(self, arrays: Sequence[Any]) -> PagedPass:
        """The template with `arrays` as `inputs` returns them."""
        positions, slots, prefill, decode, *items = arrays
        tiles = {key: replace(of, items=one) for (key, of), one in zip(self.tiles.items(), items, strict=True)}
        return replace(self, positions=positions, slots=slots, pages=(prefill, decode), tiles=tiles)

    def _keys(self, windows: Sequence[int]) -> list[tuple[bool, int]]:
        return [(decode, window) for decode in self.segments for window in windows]


class PagedLayer:
    """A layer's `pool`, and its `window`, 0 for none."""

    def __init__(self, pool: Pool, window: int, step: PagedPass) -> None:
        self.pool = pool
        self.written: Any = None
        self.step = step
        self.window = window

    @property
    def offset(self) -> Any:
        """Positions (T,) of the pass's tokens."""
        return self.step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask, as the kernels compute it; or the window, where only the model knows it."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write `keys` and `values` (T, kv heads, 1, D) to the pool."""
        self.written = self.step.kernels.write(self.pool, keys, values, self.step.slots)
        return keys, values

    def attend(self, queries: Any, keys: Any, values: Any, scale: float, window: int, sinks: Any | None) -> Any:
        """Causal attention (T, query heads, 1, D) of `queries` of that shape, each token over its own sequence. `keys`
        and `values` are what `update_and_fetch` returned: the self-test checks that."""
        if sinks is not None:
            raise NotImplementedError("the kernels know no attention sinks")
        window = min(filter(None, (window, self.window)), default=0)
        return self.step.attend(queries, self.pool, self.written, window=window, scale=scale)


def _padded(array: npt.NDArray[np.int32], least: int) -> npt.NDArray[np.int32]:
    """`array` (n, ...), padded with zeros to a power of two from `least` on. A tile of zeros has no rows."""
    size = max(least, 1 << (len(array) - 1).bit_length())
    padded = np.zeros((size, *array.shape[1:]), np.int32)
    padded[: len(array)] = array
    return padded
