"""How a step's attention is cut into pieces of work: tiles of query rows over ranges of cached tokens. Pure numbers.

A segment is what one row computes in a step. Segments of few packed rows (tokens times grouped query heads) go to one
kernel, the others to another. A long range of cached tokens is split, so that a long row keeps nobody waiting and few
rows keep the whole device busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Segments = npt.NDArray[np.int32]
"""One a line: where its tokens are in the pass, how many, the position of the first in its row, and where the row's
pages begin among all pages that are handed over."""
FIRST, COUNT, POSITION, PAGES = range(4)

FEW = (8, 16)
"""Packed rows of a tile for few rows: the smallest that holds all segments' is taken."""
MANY = 128
"""Packed rows of a tile for many."""
FEW_BLOCKS = 264
"""Blocks of a launch for few rows, all kv heads counted: two for each of a large GPU's multiprocessors. All get
the same number of cached tokens."""
MANY_SLOTS = {64: 264, 128: 264, 256: 132}
"""Blocks for many rows that a large GPU runs at a time, by a head's dimensions: two or one for each multiprocessor."""
COUNTERS = 1 << 16
"""Blocks of a launch whose partial results may be merged."""
TILE = 16
"""Cached tokens that a warp of a block for few rows looks at together."""
_FEW_LEAST = 4
_MANY_STEP, _MANY_LEAST = 32, 256
_CUTS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 22, 32, 44, 64)
_START, _MERGE, _MERGE_EACH = 170, 100, 12
"""What a part costs, one of several, and for each of them: in the time that a cached token takes (measured, H200)."""
_ALONE = 0.63
"""What a block takes alone on its multiprocessor, of what it takes as one of two."""
_GAIN = 0.95
"""What a finer cut must bring it down to: the times are rough."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pieces of work for one launch, tiles of `rows` packed rows: `items` (n, 8) int32 on the host or the device, for
    `blocks` blocks a kv head. `parts` is how many partial results may be left, 0 where no tile's range is split.

    Where the tiles are of few rows, `items` begins with as many lines as it takes to say where each block's items begin
    and the last one's end."""

    items: Any
    rows: int
    blocks: int
    parts: int


def is_few(tokens: Any, rep: int) -> Any:
    """Whether segments of that many tokens go to the kernel for few rows."""
    return tokens * rep <= FEW[-1]


def few_tiles(segments: Segments, *, rep: int, heads: int, window: int) -> Tiles:
    """One tile for each segment, all of which are few, in ranges that give every block as many cached tokens."""
    most = int(segments[:, COUNT].max()) * rep
    rows = next(size for size in FEW if most <= size)
    tiles = _whole(segments, window)
    tiles[:, 1] = segments[:, COUNT] * rep
    blocks = max(1, FEW_BLOCKS // heads)
    sizes = -(-(tiles[:, 5] - tiles[:, 4]) // TILE)
    each = max(_FEW_LEAST, -(-int(sizes.sum()) // blocks))
    items, begins = _dealt(tiles, sizes, each)
    lines = (blocks + 8) // 8
    starts = np.zeros((lines + len(items), 8), np.int32)
    starts[lines:] = items
    starts[:lines].reshape(-1)[: blocks + 1] = begins.searchsorted(np.arange(0, (blocks + 1) * each, each))
    return Tiles(starts, rows, blocks, 2 * blocks)


def _dealt(tiles: Segments, sizes: npt.NDArray[np.int32], each: int) -> tuple[Segments, npt.NDArray[np.int64]]:
    """The tiles, one behind the other, cut wherever a block has its `each` pieces of TILE tokens; and the piece that
    each of the cut ones begins with."""
    ends = sizes.cumsum(dtype=np.int64)
    starts = ends - sizes
    block = starts // each  # that the tile begins in
    splits = (ends - 1) // each - block + 1
    row = np.arange(len(tiles)).repeat(splits)
    index = np.arange(len(row)) - (splits.cumsum() - splits)[row]
    begins = np.maximum(starts[row], (block[row] + index) * each)
    items = tiles[row]
    items[:, 4] += (begins - starts[row]) * TILE
    items[:-1, 5] = np.minimum(items[:-1, 5], items[:-1, 4] + (begins[1:] - begins[:-1]) * TILE)
    parts = splits * (splits > 1)
    items[:, 2] = (parts.cumsum() - parts)[row]
    items[:, 7] = index << 16 | splits[row]
    return items, begins


def many_tiles(segments: Segments, *, rep: int, heads: int, window: int, dim: int) -> Tiles:
    """Tiles of MANY packed rows, the longest first; each looks at no more than its own last token may see."""
    counts = segments[:, COUNT] * rep
    each = -(-counts // MANY)
    segments = np.repeat(segments, each, axis=0)
    counts = np.repeat(counts, each)
    tiles = _whole(segments, window)
    row0 = (np.arange(len(segments)) - np.repeat(np.cumsum(each) - each, each)) * MANY
    tiles[:, 1] = np.minimum(MANY, counts - row0)
    tiles[:, 2] = row0
    tiles[:, 4] = _low(segments[:, POSITION] + row0 // rep, window) // _MANY_STEP * _MANY_STEP
    tiles[:, 5] = segments[:, POSITION] + (row0 + tiles[:, 1] - 1) // rep + 1
    seen = tiles[:, 5] - tiles[:, 4]
    return _split(tiles, seen, -(-seen // _part(seen, heads, MANY_SLOTS[dim])))


def _whole(segments: Segments, window: int) -> Segments:
    """A tile for each segment over all that it sees, its packed rows still open."""
    tiles = np.zeros((len(segments), 8), np.int32)
    tiles[:, 0] = segments[:, FIRST]
    tiles[:, 3] = segments[:, POSITION]
    tiles[:, 4] = _low(segments[:, POSITION], window)
    tiles[:, 5] = segments[:, POSITION] + segments[:, COUNT]
    tiles[:, 6] = segments[:, PAGES]
    return tiles


def _low(positions: npt.NDArray[np.int32], window: int) -> npt.NDArray[np.int32]:
    """The first cached tokens that queries at `positions` see, rounded down to a multiple of TILE."""
    if not window:
        return np.zeros_like(positions)
    low: npt.NDArray[np.int32] = np.maximum(0, positions - window + 1)
    return low - low % TILE


def _part(seen: npt.NDArray[np.int32], heads: int, slots: int) -> int:
    """The most cached tokens that a part should have: what would end soonest of a few ways to cut."""
    longest = int(seen.max())
    enough = 1.05 * int((seen + _START).sum(dtype=np.int64)) * heads / slots  # nearly what no idle slot makes it
    best, part = math.inf, longest
    for cuts in _CUTS:
        size = -(-longest // (cuts * _MANY_STEP)) * _MANY_STEP
        splits = -(-seen // size)
        if cuts > 1 and (size < _MANY_LEAST or int(splits.sum()) * heads > COUNTERS):
            break
        end = _end(seen, splits, heads, slots)
        if end < _GAIN * best:
            best, part = end, size
        if best <= enough or end > 1.5 * best:
            break
    return part


def _end(seen: npt.NDArray[np.int32], splits: npt.NDArray[np.int32], heads: int, slots: int) -> float:
    """When such parts are through, the longest first, on a clock of cached tokens."""
    each = -(-seen // splits) + _START + np.where(splits > 1, _MERGE + _MERGE_EACH * splits, 0)
    lengths = np.repeat(np.sort(np.repeat(each, splits))[::-1], heads)
    if slots == max(MANY_SLOTS.values()) and 2 * len(lengths) <= slots:
        return _ALONE * int(lengths[0])
    waves = np.zeros(-(-len(lengths) // slots) * slots, np.int64)
    waves[: len(lengths)] = lengths
    busy = np.zeros(slots, np.int64)
    for wave in waves.reshape(-1, slots):
        busy = np.sort(busy) + wave
    return int(busy.max())


def _split(tiles: Segments, seen: npt.NDArray[np.int32], splits: npt.NDArray[np.int32]) -> Tiles:
    """The tiles in so many parts each, those of a tile side by side, the longest first."""
    order = np.argsort(-(seen // splits), kind="stable")
    tiles, seen, splits = tiles[order], seen[order], splits[order]
    width = -(-seen // (splits * _MANY_STEP)) * _MANY_STEP
    tiles, width, index = np.repeat(tiles, splits, axis=0), np.repeat(width, splits), np.arange(splits.sum())
    index -= np.repeat(np.cumsum(splits) - splits, splits)
    start = tiles[:, 4] + index * width
    tiles[:, 5] = np.minimum(tiles[:, 5], start + width)
    tiles[:, 4] = start
    tiles[:, 7] = index << 16 | np.repeat(splits, splits)
    return Tiles(tiles, MANY, len(tiles), len(tiles) if (splits > 1).any() else 0)
