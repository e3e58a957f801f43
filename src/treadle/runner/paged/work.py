"""How a step's attention is cut into pieces of work: tiles of query rows over ranges of cached tokens. Pure numbers.

A segment is what one row computes in a step. Segments of few packed rows (tokens times grouped query heads) go to one
kernel, the others to another. A long range of cached tokens is split, so that a long row keeps nobody waiting and few
rows keep the whole device busy.
"""

from __future__ import annotations

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
"""Blocks of a launch for few rows, all kv heads counted: two for each of a large GPU's multiprocessors, which all get the
same number of cached tokens."""
MANY_BLOCKS = 396
"""Blocks that a launch for many rows should have at least: a few for each of a large GPU's multiprocessors."""
COUNTERS = 1 << 16
"""Blocks of a launch whose partial results may be merged."""
TILE = 16
"""Cached tokens that a warp of a block for few rows looks at together."""
_FEW_LEAST = 4
_STEP = 64
_MANY_LEAST = 512
_MOST_SPLITS = 256


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
    starts = np.zeros((blocks + 8) // 8 * 8, np.int32)
    starts[: blocks + 1] = np.searchsorted(begins, np.arange(blocks + 1) * each)
    return Tiles(np.concatenate([starts.reshape(-1, 8), items]), rows, blocks, 2 * blocks)


def _dealt(tiles: Segments, sizes: npt.NDArray[np.int32], each: int) -> tuple[Segments, npt.NDArray[np.int64]]:
    """The tiles, one behind the other, cut wherever a block has its `each` pieces of TILE tokens; and the piece that each
    of the cut ones begins with."""
    ends = np.cumsum(sizes, dtype=np.int64)
    borders = np.union1d(ends, np.arange(each, ends[-1], each))
    begins = np.concatenate([[0], borders[:-1]])
    row = np.searchsorted(ends, begins, side="right")
    items = tiles[row]
    items[:, 4] += (begins - (ends - sizes)[row]).astype(np.int32) * TILE
    items[:, 5] = np.minimum(items[:, 5], items[:, 4] + (borders - begins) * TILE)
    splits = np.bincount(row, minlength=len(tiles))
    parts = np.where(splits > 1, splits, 0)
    items[:, 2] = (np.cumsum(parts) - parts)[row]
    index = np.arange(len(items)) - (np.cumsum(splits) - splits)[row]
    items[:, 7] = index << 16 | splits[row]
    return items, begins


def many_tiles(segments: Segments, *, rep: int, heads: int, window: int) -> Tiles:
    """Tiles of MANY packed rows; each looks at no more than its own last token may see."""
    counts = segments[:, COUNT] * rep
    each = -(-counts // MANY)
    segments = np.repeat(segments, each, axis=0)
    counts = np.repeat(counts, each)
    tiles = _whole(segments, window)
    row0 = (np.arange(len(segments)) - np.repeat(np.cumsum(each) - each, each)) * MANY
    tiles[:, 1] = np.minimum(MANY, counts - row0)
    tiles[:, 2] = row0
    tiles[:, 4] = _low(segments[:, POSITION] + row0 // rep, window)
    tiles[:, 5] = segments[:, POSITION] + (row0 + tiles[:, 1] - 1) // rep + 1
    return _split(tiles, heads)


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
    low = np.maximum(0, positions - window + 1) if window else np.zeros_like(positions)
    return low - low % TILE


def _split(tiles: Segments, heads: int) -> Tiles:
    """The tiles of many rows, those with long ranges in several parts, side by side."""
    seen = tiles[:, 5] - tiles[:, 4]
    part = max(_MANY_LEAST, int(seen.sum(dtype=np.int64)) * heads // MANY_BLOCKS, -(-int(seen.max()) // _MOST_SPLITS))
    if len(tiles) * heads + 2 * MANY_BLOCKS > COUNTERS:  # enough of them as they are
        part = int(seen.max())
    part = -(-part // _STEP) * _STEP
    splits = np.maximum(1, -(-seen // part))
    if (splits == 1).all():
        tiles[:, 7] = 1
        return Tiles(tiles, MANY, len(tiles), 0)
    width = -(-seen // (splits * TILE)) * TILE
    tiles, width, index = np.repeat(tiles, splits, axis=0), np.repeat(width, splits), np.arange(splits.sum())
    index -= np.repeat(np.cumsum(splits) - splits, splits)
    start = tiles[:, 4] + index * width
    tiles[:, 5] = np.maximum(start, np.minimum(tiles[:, 5], start + width))
    tiles[:, 4] = start
    tiles[:, 7] = index << 16 | np.repeat(splits, splits)
    return Tiles(tiles, MANY, len(tiles), len(tiles))
