"""Split-KV planning: a step's attention as tiles of query rows over ranges of cached tokens. Pure numbers.

A segment has tokens times grouped query heads packed rows. Segments of at most 16 packed rows go to the decode kernel,
longer ones to the prefill kernel; heads that are too wide for both go to the wide kernel, in tiles of few rows or of
many. Long ranges of cached tokens are split, so that a long sequence delays no other and a
few sequences keep the whole device busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Visible = npt.NDArray[np.int32]
Segments = npt.NDArray[np.int32]
"""A segment a line (n, 8): its first token in the batch, its tokens, the first one's position in the sequence, and the
start of the sequence's page table among all, in columns where its tiles have them, too. The others are zeros."""
COLUMNS = 8
FIRST, COUNT, POSITION, PAGES = 0, 1, 3, 6

DECODE_ROWS = (8, 16)
"""Packed rows of a decode tile: the smallest size that holds all segments."""
PREFILL_ROWS = 128
"""Packed rows of a prefill tile."""
DECODE_BLOCKS = 264
"""Blocks of a decode launch, all kv heads counted: two for each of a large GPU's multiprocessors. All read the same
number of cached tokens."""
WIDE_ROWS = (16, 32, 64)
"""Packed rows of a tile of the wide kernel: of segments that decode the smallest size that holds them all, of others
the last that shared memory allows."""
PREFILL_SLOTS = {128: 264, 256: 132}
"""Prefill blocks that a large GPU runs at a time, by the most dimensions of a head: two or one a multiprocessor."""
WIDE_SLOTS = 132
"""The same of the wide kernel, where one block has a multiprocessor."""
COUNTERS = 1 << 16
"""Blocks of a launch whose partial results may be merged."""
TILE = 16
"""Cached tokens that a warp of the decode kernel reads together."""
_DECODE_LEAST = 4
_PART_STEP = 64
"""Cached tokens whose multiples parts are chosen for."""
_PREFILL_STEP, _PREFILL_LEAST, _WIDE_LEAST = 32, 256, 128
_BLOCKS, _WIDE_BLOCKS = 512, 256
"""The least blocks of a launch of the prefill and of the wide kernel. Those without work cost nearly nothing, as they
all run at once."""
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 22, 32, 44, 64)
_START, _MERGE, _MERGE_EACH = 170, 100, 12
"""Costs of a part, of a split tile, and of each of its parts, in times of a cached token (measured, H200)."""
_ALONE = 0.63
"""Time of a block alone on its multiprocessor, relative to one of two."""
_GAIN = 0.95
"""A finer split must be at least so much faster: the times are rough."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of `rows` packed rows for one launch: `items` (n, 8) int32, on the host or the device, for `blocks` blocks
    a kv head. `parts` is the most partial results that may be left, 0 where no tile's range is split. `visible` (T, 2)
    int32 are the first and the last cached token that each token sees, where these do not follow from its position.

    In decode tiles, `items` begins with lines that hold the start of each block's items, and the last one's end."""

    items: Any
    rows: int
    blocks: int
    parts: int
    visible: Any = None

    @property
    def arrays(self) -> list[Any]:
        return [self.items] if self.visible is None else [self.items, self.visible]

    @property
    def bare(self) -> Tiles:
        """The tiles without their arrays; `visible` says whether there are such numbers."""
        return replace(self, items=None, visible=None if self.visible is None else ())

    def filled(self, arrays: Iterator[Any]) -> Tiles:
        """The tiles with the next ones of `arrays`, in the order of their own."""
        items = next(arrays)
        return replace(self, items=items, visible=None if self.visible is None else next(arrays))


def within_chunks(segments: Segments, chunk: int, page: int) -> Segments:
    """Segments whose tokens see those of their own chunk alone, a multiple of `page` tokens, as segments of as many
    sequences that begin with a chunk."""
    starts = segments[:, POSITION]
    ends = starts + segments[:, COUNT]
    first = starts // chunk
    parts = (ends - 1) // chunk - first + 1
    row = np.arange(len(segments)).repeat(parts)
    borders = (first[row] + np.arange(len(row)) - (parts.cumsum() - parts)[row]) * chunk
    lows, highs = np.maximum(starts[row], borders), np.minimum(ends[row], borders + chunk)
    made = segments[row]
    made[:, FIRST] += lows - starts[row]
    made[:, COUNT] = highs - lows
    made[:, POSITION] = lows - borders
    made[:, PAGES] += borders // page
    return made


def decode_tiles(segments: Segments, *, rep: int, heads: int, window: int = 0, visible: Visible | None = None) -> Tiles:
    """One tile for each segment, all of which are short, split so that every block reads as many cached tokens. Tokens
    see a `window`, or what is `visible` of the cached ones."""
    most = int(segments[:, COUNT].max()) * rep
    rows = next(size for size in DECODE_ROWS if most <= size)
    tiles = _whole(segments, window)
    tiles[:, 1] = segments[:, COUNT] * rep
    if visible is not None:
        tiles[:, 4:6] = _ranges(visible, tiles[:, 0], tiles[:, 0] + segments[:, COUNT], TILE)
    blocks = max(1, DECODE_BLOCKS // heads)
    even = _even_parts(_pieces(tiles, TILE), blocks)
    items = even.begun.copy()
    made = items[-len(even.row) :]
    made[:] = tiles[even.row]
    made[:, 4] += even.offset
    made[:, 5] = np.minimum(made[:, 5], made[:, 4] + even.length)
    made[:, 2], made[:, 7] = even.partial, even.split
    return Tiles(items, rows, blocks, 2 * blocks, visible)


class _EvenParts(NamedTuple):
    """Parts of decode tiles: the index of each one's tile, and its first cached token and its tokens among those of
    the tile; the index of its partial result, and which of how many parts of its tile it is. `begun` is an array of
    items, with the lines in front of them set."""

    row: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    partial: npt.NDArray[np.int32]
    split: npt.NDArray[np.int32]
    begun: Segments


@lru_cache(maxsize=64)
def _even_parts(pieces: bytes, blocks: int) -> _EvenParts:
    """Split tiles of so many `pieces` (int32) of TILE tokens, one behind the other, wherever a block has its share of
    them. The same for up to TILE steps of a sequence."""
    sizes = np.frombuffer(pieces, np.int32)
    each = max(_DECODE_LEAST, -(-int(sizes.sum()) // blocks))
    ends = sizes.cumsum(dtype=np.int64)
    starts = ends - sizes
    block = starts // each  # that the tile begins in
    splits = (ends - 1) // each - block + 1
    row = np.arange(len(sizes)).repeat(splits)
    index = np.arange(len(row)) - (splits.cumsum() - splits)[row]
    begins = np.maximum(starts[row], (block[row] + index) * each)
    lengths = np.concatenate([begins[1:], ends[-1:]]) - begins
    parts = splits * (splits > 1)
    lines = (blocks + 8) // 8
    begun = np.zeros((lines + len(row), 8), np.int32)
    begun[:lines].reshape(-1)[: blocks + 1] = begins.searchsorted(np.arange(0, (blocks + 1) * each, each))
    return _EvenParts(
        row,
        ((begins - starts[row]) * TILE).astype(np.int32),
        (lengths * TILE).astype(np.int32),
        (parts.cumsum() - parts)[row].astype(np.int32),
        (index << 16 | splits[row]).astype(np.int32),
        begun,
    )


def prefill_tiles(
    segments: Segments, *, rep: int, heads: int, dim: int, window: int = 0, visible: Visible | None = None
) -> Tiles:
    """Tiles of PREFILL_ROWS packed rows, the longest first; each reads no further than its tokens see. `dim` are the
    dimensions of a head."""
    slots = next(slots for most, slots in PREFILL_SLOTS.items() if dim <= most)
    tiles = _tiles_of(segments, rep, window, PREFILL_ROWS, visible)
    return _split(tiles, PREFILL_ROWS, visible, heads, slots, _PREFILL_LEAST)


def wide_tiles(
    segments: Segments,
    *,
    rep: int,
    heads: int,
    rows: int,
    window: int = 0,
    each: int = 1,
    visible: Visible | None = None,
) -> Tiles:
    """Tiles of `rows` packed rows for the wide kernel, of which `each` blocks share a multiprocessor."""
    tiles = _tiles_of(segments, rep, window, rows, visible)
    return _split(tiles, rows, visible, heads, each * WIDE_SLOTS, _WIDE_LEAST)


def in_few_sizes(tiles: Tiles, heads: int) -> Tiles:
    """Tiles without the decode kernel's lines, padded to one of few sizes, with memory for partial results that a
    launch of that size may leave."""
    least = max(1, (_BLOCKS if tiles.rows == PREFILL_ROWS else _WIDE_BLOCKS) // heads)
    items = padded(tiles.items, least)
    blocks, room = len(items), 2 * least  # for partial results, also where no tile is split
    return replace(tiles, items=items, blocks=blocks, parts=room if blocks <= room else blocks if tiles.parts else 0)


def padded(array: npt.NDArray[np.int32], least: int) -> npt.NDArray[np.int32]:
    """`array` (n, ...), padded with zeros to a power of two from `least` on. A tile of zeros has no rows."""
    size = max(least, 1 << (len(array) - 1).bit_length())
    made = np.zeros((size, *array.shape[1:]), np.int32)
    made[: len(array)] = array
    return made


def _tiles_of(segments: Segments, rep: int, window: int, rows: int, visible: Visible | None) -> Segments:
    """Tiles of `rows` packed rows over all cached tokens that they see."""
    counts = segments[:, COUNT] * rep
    begins: Any = 0
    ends = segments[:, COUNT]
    if int(counts.max()) <= rows:
        tiles = segments.copy()
        tiles[:, 1] = counts
    else:
        each = -(-counts // rows)
        tiles = segments.repeat(each, axis=0)
        row0 = (np.arange(len(tiles)) - np.repeat(np.cumsum(each) - each, each)) * rows
        tiles[:, 1] = np.minimum(rows, np.repeat(counts, each) - row0)
        tiles[:, 2] = row0
        begins, ends = row0 // rep, (row0 + tiles[:, 1] - 1) // rep + 1
    if visible is not None:
        tiles[:, 4:6] = _ranges(visible, tiles[:, 0] + begins, tiles[:, 0] + ends, _PREFILL_STEP)
        return tiles
    if window:
        tiles[:, 4] = _low(tiles[:, 3] + begins, window) // _PREFILL_STEP * _PREFILL_STEP
    tiles[:, 5] = tiles[:, 3] + ends
    return tiles


def _whole(segments: Segments, window: int) -> Segments:
    """A tile for each segment over all cached tokens that it sees; its packed rows are not set yet."""
    tiles = segments.copy()
    if window:
        tiles[:, 4] = _low(tiles[:, 3], window)
    tiles[:, 5] = tiles[:, 3] + segments[:, COUNT]
    return tiles


def _pieces(tiles: Segments, size: int) -> bytes:
    """The number (int32) of pieces of `size` tokens, a power of two, that each tile's cached tokens have."""
    return (tiles[:, 5] - tiles[:, 4] + (size - 1) >> size.bit_length() - 1).tobytes()


def _ranges(visible: Visible, first: Segments, end: Segments, step: int) -> Segments:
    """Cached tokens (n, 2), from a multiple of `step` on, that tokens `first` to `end` of a launch see."""
    pairs, behind = np.stack([first, end], axis=1).ravel(), visible[-1:]
    lows = np.minimum.reduceat(np.concatenate([visible, behind])[:, 0], pairs)[::2]
    highs = np.maximum.reduceat(np.concatenate([visible, behind])[:, 1], pairs)[::2]
    return np.stack([lows // step * step, highs + 1], axis=1)


def _low(positions: npt.NDArray[np.int32], window: int) -> npt.NDArray[np.int32]:
    """The first cached tokens that queries at `positions` see, rounded down to a multiple of TILE."""
    low: npt.NDArray[np.int32] = np.maximum(0, positions - window + 1)
    return low - low % TILE


def _split(tiles: Segments, rows: int, visible: Visible | None, heads: int, slots: int, least: int) -> Tiles:
    """The tiles in parts, those of a tile side by side, the longest first."""
    parts = _long_parts(_pieces(tiles, _PREFILL_STEP), heads, slots, least)
    made = tiles[parts.row]
    made[:, 4] += parts.offset
    made[:, 5] = np.minimum(made[:, 5], made[:, 4] + parts.length)
    made[:, 7] = parts.split
    return Tiles(made, rows, len(made), len(made) if len(made) > len(tiles) else 0, visible)


class _LongParts(NamedTuple):
    """Parts of tiles that do not decode: the index of each one's tile, its first cached token and its tokens among
    those of the tile, and which of how many parts of the tile it is."""

    row: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    split: npt.NDArray[np.int32]


@lru_cache(maxsize=64)
def _long_parts(pieces: bytes, heads: int, slots: int, least: int) -> _LongParts:
    """Split tiles of so many `pieces` (int32) of _PREFILL_STEP tokens. The same for as many steps of a sequence."""
    sizes = np.frombuffer(pieces, np.int32)
    tokens = sizes * _PREFILL_STEP
    splits = -(-tokens // _best_part((-(-tokens // _PART_STEP) * _PART_STEP).tobytes(), heads, slots, least))
    order = np.argsort(-(tokens // splits), kind="stable")
    each, widths = splits[order], -(-sizes // splits)[order] * _PREFILL_STEP
    index = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    widths, each, order = (np.repeat(some, each) for some in (widths, each, order))
    return _LongParts(
        order,
        (index * widths).astype(np.int32),
        widths.astype(np.int32),
        (index << 16 | each).astype(np.int32),
    )


@lru_cache(maxsize=256)
def _best_part(numbers: bytes, heads: int, slots: int, least: int) -> int:
    """The most cached tokens of a part, for tiles that see so many of them (int32): the split that ends soonest of a
    few. The same for some steps of sequences that grow slowly."""
    seen = np.frombuffer(numbers, np.int32)
    longest = int(seen.max())
    enough = 1.05 * int((seen + _START).sum(dtype=np.int64)) * heads / slots  # nearly the least: no slot is idle
    best, part = math.inf, longest
    for cuts in _SPLITS:
        size = -(-longest // (cuts * _PREFILL_STEP)) * _PREFILL_STEP
        splits = -(-seen // size)
        if cuts > 1 and (size < least or int(splits.sum()) * heads > COUNTERS):
            break
        end = _end(seen, splits, heads, slots)
        if end < _GAIN * best:
            best, part = end, size
        if best <= enough or end > 1.5 * best:
            break
    return part


def _end(seen: npt.NDArray[np.int32], splits: npt.NDArray[np.int32], heads: int, slots: int) -> float:
    """The time when such parts are done, the longest first, in times of a cached token."""
    each = -(-seen // splits) + _START + np.where(splits > 1, _MERGE + _MERGE_EACH * splits, 0)
    lengths = np.repeat(np.sort(np.repeat(each, splits))[::-1], heads)
    if slots == max(PREFILL_SLOTS.values()) and 2 * len(lengths) <= slots:
        return _ALONE * int(lengths[0])
    waves = np.zeros(-(-len(lengths) // slots) * slots, np.int64)
    waves[: len(lengths)] = lengths
    busy = np.zeros(slots, np.int64)
    for wave in waves.reshape(-1, slots):
        busy = np.sort(busy) + wave
    return int(busy.max())
