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
FEW_BLOCKS = 1056
MANY_BLOCKS = 396
"""Blocks that a launch should have at least, all kv heads counted: a few for each of a large GPU's multiprocessors."""
COUNTERS = 1 << 16
"""Blocks of a launch whose partial results may be merged."""
_STEP = 64
_FEW_LEAST, _MANY_LEAST = 64, 512
_MOST_SPLITS = 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pieces of work for one launch: `items` (n, 8) int32 on the host or the device, tiles of `rows` packed rows;
    `split` says whether any tile's range is split."""

    items: Any
    rows: int
    split: bool
    count: int

    def __len__(self) -> int:
        return self.count


def is_few(tokens: Any, rep: int) -> Any:
    """Whether segments of that many tokens go to the kernel for few rows."""
    return tokens * rep <= FEW[-1]


def few_tiles(segments: Segments, *, rep: int, heads: int, window: int) -> Tiles:
    """One tile for each segment, all of which are few."""
    most = int(segments[:, COUNT].max()) * rep
    rows = next(size for size in FEW if most <= size)
    tiles = _whole(segments, window)
    tiles[:, 1] = segments[:, COUNT] * rep
    return _split(tiles, rows, heads, FEW_BLOCKS, _FEW_LEAST)


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
    return _split(tiles, MANY, heads, MANY_BLOCKS, _MANY_LEAST)


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
    """The first cached tokens that queries at `positions` see, rounded down to a multiple of 16."""
    low = np.maximum(0, positions - window + 1) if window else np.zeros_like(positions)
    return low - low % 16


def _split(tiles: Segments, rows: int, heads: int, blocks: int, least: int) -> Tiles:
    """The tiles with long ranges in several parts, side by side."""
    seen = tiles[:, 5] - tiles[:, 4]
    part = max(least, int(seen.sum(dtype=np.int64)) * heads // blocks, -(-int(seen.max()) // _MOST_SPLITS))
    if len(tiles) * heads + 2 * blocks > COUNTERS:  # enough of them as they are
        part = int(seen.max())
    part = -(-part // _STEP) * _STEP
    splits = np.maximum(1, -(-seen // part))
    split = bool((splits > 1).any())
    if split:
        width = -(-seen // (splits * 16)) * 16
        tiles, width, index = np.repeat(tiles, splits, axis=0), np.repeat(width, splits), np.repeat(splits, splits)
        index = np.arange(len(tiles), dtype=np.int32) - np.repeat(np.cumsum(splits) - splits, splits)
        start = tiles[:, 4] + index * width
        tiles[:, 5] = np.maximum(start, np.minimum(tiles[:, 5], start + width))
        tiles[:, 4] = start
        tiles[:, 7] = (index << 16) | np.repeat(splits, splits)
    else:
        tiles[:, 7] = 1
    return Tiles(tiles, rows, split, len(tiles))
