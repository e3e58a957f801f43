"""How a step's attention is cut into pieces of work: tiles of query rows over ranges of cached tokens. Pure numbers.

A segment is what one row computes in a step: `tokens` tokens that stand at `first` in the pass, the first of them at
`position` in its sequence. Segments of few packed rows (tokens times grouped query heads) go to one kernel, the others
to another. A long range of cached tokens is split, so that a long row keeps nobody waiting and few rows keep
the whole device busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FEW = (8, 16)
"""Packed rows of a tile for few rows: the smallest that holds all segments' is taken."""
MANY = 128
"""Packed rows of a tile for many."""
FEW_BLOCKS = 1056
MANY_BLOCKS = 396
"""Blocks that a launch should have at least, all kv heads counted: a few for each of a large GPU's multiprocessors."""
_FEW_STEP, _MANY_STEP = 64, 64
_FEW_LEAST, _MANY_LEAST = 64, 512
_MOST_SPLITS = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """`pages` is where the row's pages begin among all pages that are handed over."""

    first: int
    tokens: int
    position: int
    pages: int

    @property
    def end(self) -> int:
        return self.position + self.tokens


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


def is_few(tokens: int, rep: int) -> bool:
    """Whether a segment of that many tokens goes to the kernel for few rows."""
    return tokens * rep <= FEW[-1]


def few_tiles(segments: Sequence[Segment], *, rep: int, heads: int, window: int) -> Tiles:
    """One tile for each segment, all of which are few."""
    rows = next(size for size in FEW if max(s.tokens for s in segments) * rep <= size)
    wanted = [(s, 0, s.tokens * rep, _low(s.position, window, 16), s.end) for s in segments]
    return _tiles(wanted, rows, heads, FEW_BLOCKS, _FEW_STEP, _FEW_LEAST)


def many_tiles(segments: Sequence[Segment], *, rep: int, heads: int, window: int) -> Tiles:
    """Tiles of MANY packed rows; each looks at no more than its own last token may see."""
    wanted = []
    for s in segments:
        for row0 in range(0, s.tokens * rep, MANY):
            rows = min(MANY, s.tokens * rep - row0)
            first, last = s.position + row0 // rep, s.position + (row0 + rows - 1) // rep
            wanted.append((s, row0, rows, _low(first, window, 16), last + 1))
    return _tiles(wanted, MANY, heads, MANY_BLOCKS, _MANY_STEP, _MANY_LEAST)


def _low(position: int, window: int, multiple: int) -> int:
    """The first cached token that a query at `position` sees, rounded down."""
    low = max(0, position - window + 1) if window else 0
    return low - low % multiple


def _tiles(
    wanted: Sequence[tuple[Segment, int, int, int, int]], rows: int, heads: int, blocks: int, step: int, least: int
) -> Tiles:
    total = sum(hi - lo for *_, lo, hi in wanted)
    longest = max(hi - lo for *_, lo, hi in wanted)
    part = max(least, total * heads // blocks, -(-longest // _MOST_SPLITS))
    part = -(-part // step) * step
    items: list[tuple[int, ...]] = []
    for s, row0, count, lo, hi in wanted:
        splits = max(1, -(-(hi - lo) // part))
        each = -(-(hi - lo) // (splits * 16)) * 16
        for i in range(splits):
            start = lo + i * each
            end = max(start, min(hi, start + each))
            items.append((s.first, count, row0, s.position, start, end, s.pages, i << 16 | splits))
    array: npt.NDArray[np.int32] = np.array(items, np.int32)
    return Tiles(array, rows, any(item[7] & 0xFFFF > 1 for item in items), len(items))
