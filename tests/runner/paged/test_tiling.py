"""How attention is cut into pieces: each query's visible tokens are looked at by exactly one of them."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.runner.kv.paged.tiling import (
    COLUMNS,
    COUNT,
    COUNTERS,
    DECODE_BLOCKS,
    DECODE_ROWS,
    FIRST,
    PAGES,
    POSITION,
    PREFILL_ROWS,
    TILE,
    WIDE_ROWS,
    Tiles,
    decode_tiles,
    in_few_sizes,
    prefill_tiles,
    wide_tiles,
    within_chunks,
)

PAGE = 32
GIVEN = (0, 1, 15, 16, 500, 4096, 40_000)
POSITIONS = st.one_of(st.integers(0, 300), st.integers(0, 40_000), st.sampled_from(GIVEN))
WINDOWS = st.sampled_from([0, 1, 17, 32, 512, 4096])
HEADS = st.sampled_from([1, 2, 8, 32])
REP = st.integers(1, 16)


def segments(parts: list[tuple[int, int]]) -> np.ndarray:
    """Of (tokens, position) each, side by side, with as many pages as they need."""
    counts = np.array([count for count, _ in parts])
    positions = np.array([position for _, position in parts])
    pages = -(-(counts + positions) // PAGE)
    lines = np.zeros((len(parts), COLUMNS), np.int32)
    lines[:, [FIRST, COUNT, POSITION, PAGES]] = np.stack(
        [np.cumsum(counts) - counts, counts, positions, np.cumsum(pages) - pages], axis=1
    )
    return lines


def items_of(tiles: Tiles, wide: bool = False) -> np.ndarray:
    """The pieces of work alone, packed rows first; of those for few rows, that they are dealt out as they should be."""
    if wide or tiles.rows == PREFILL_ROWS:
        assert tiles.blocks == len(tiles.items)
        return tiles.items
    lines = (tiles.blocks + 8) // 8
    starts, items = tiles.items[:lines].ravel()[: tiles.blocks + 1], tiles.items[lines:].copy()
    assert starts[0] == 0
    assert starts[-1] == len(items)
    sizes = -(-(items[:, 5] - items[:, 4]) // TILE)
    each = [sizes[begin:end].sum() for begin, end in pairwise(starts)]
    busy = len(items) and max(i for i, n in enumerate(each) if n)
    assert len(set(each[:busy])) <= 1, "blocks have different shares"
    assert each[busy] <= each[0]
    split = items[items[:, 7] & 0xFFFF > 1]
    assert (split[:, 2] + (split[:, 7] >> 16)).tolist() == list(range(len(split)))
    assert len(split) <= tiles.parts
    items[:, 2] = 0
    return items


def check(some: np.ndarray, tiles: Tiles, rep: int, window: int, heads: int = 1, *, wide: bool = False) -> None:
    """Every packed row of every segment is in one tile; the tile's parts begin and end where the next one goes on, and
    from the first token that any of its rows sees to the last."""
    assert tiles.parts * heads <= COUNTERS
    of_segment = {int(line[FIRST]): line for line in some}
    rows: dict[int, list[int]] = defaultdict(list)
    tile: list[np.ndarray] = []
    for item in items_of(tiles, wide):
        assert item[4] < item[5]
        assert item[4] % TILE == 0
        tile.append(item)
        index, splits = item[7] >> 16, item[7] & 0xFFFF
        assert index == len(tile) - 1
        assert tile[0][:4].tolist() == item[:4].tolist()
        assert splits == tile[0][7] & 0xFFFF
        assert tiles.parts or splits == 1
        if index == splits - 1:
            check_tile(
                of_segment[int(item[0])], tile, tiles.rows, rep, window, whole=not wide and tiles.rows != PREFILL_ROWS
            )
            rows[int(item[0])].extend(range(item[2], item[2] + item[1]))
            tile = []
    assert not tile
    assert {first: sorted(some) for first, some in rows.items()} == {
        first: list(range(line[COUNT] * rep)) for first, line in of_segment.items()
    }


def check_tile(line: np.ndarray, tile: list[np.ndarray], most: int, rep: int, window: int, *, whole: bool) -> None:
    item = tile[0]
    assert item[1] <= most
    assert (item[3], item[6]) == (line[POSITION], line[PAGES])
    assert all(before[5] == after[4] for before, after in pairwise(tile))
    first, last = (line[POSITION] + row // rep for row in (item[2], item[2] + item[1] - 1))
    lowest, step = max(0, first - window + 1) if window else 0, 16 if whole else 32
    assert item[4] % step == 0
    assert lowest - step < item[4] <= lowest
    if not whole:
        assert tile[-1][5] == last + 1
    else:
        assert tile[-1][5] == line[POSITION] + line[COUNT]
        assert last + 1 == tile[-1][5]


@given(data=st.data(), rep=REP, window=WINDOWS, heads=HEADS)
def test_few_rows_are_covered_once(data: st.DataObject, rep: int, window: int, heads: int) -> None:
    counts = st.integers(1, max(1, DECODE_ROWS[-1] // rep))
    some = segments(data.draw(st.lists(st.tuples(counts, POSITIONS), min_size=1, max_size=40)))
    tiles = decode_tiles(some, rep=rep, heads=heads, window=window)
    assert tiles.rows == (8 if some[:, COUNT].max() * rep <= 8 else 16)
    check(some, tiles, rep, window, heads)


@given(data=st.data(), rep=REP, window=WINDOWS, heads=HEADS, dim=st.sampled_from([64, 128, 256]))
def test_many_rows_are_covered_once(data: st.DataObject, rep: int, window: int, heads: int, dim: int) -> None:
    some = segments(data.draw(st.lists(st.tuples(st.integers(1, 700), POSITIONS), min_size=1, max_size=5)))
    check(some, prefill_tiles(some, rep=rep, heads=heads, window=window, dim=dim), rep, window, heads)


@given(data=st.data(), rep=REP, few=st.booleans())
def test_tiles_cover_what_tokens_see(data: st.DataObject, rep: int, few: bool) -> None:
    """From the first cached token that one of a tile's tokens sees to the last, as close as fragments are."""
    most = max(1, DECODE_ROWS[-1] // rep) if few else 300
    some = segments(data.draw(st.lists(st.tuples(st.integers(1, most), POSITIONS), min_size=1, max_size=5)))
    own = np.concatenate([np.arange(line[POSITION], line[POSITION] + line[COUNT]) for line in some])
    ends = np.repeat(some[:, POSITION] + some[:, COUNT], some[:, COUNT])
    dice = np.random.default_rng(data.draw(st.integers(0, 99)))
    visible = np.stack([dice.integers(0, own + 1), dice.integers(own, ends)], axis=1).astype(np.int32)
    if few:
        tiles = decode_tiles(some, rep=rep, heads=2, visible=visible)
    else:
        tiles = prefill_tiles(some, rep=rep, heads=2, dim=64, visible=visible)
    assert tiles.visible is visible
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for item in items_of(tiles):
        tokens = visible[item[0] + item[2] // rep : item[0] + (item[2] + item[1] - 1) // rep + 1]
        spans[int(item[0]), int(item[2])].append((int(item[4]), int(item[5])))
        if item[7] >> 16 == (item[7] & 0xFFFF) - 1:
            parts = spans[int(item[0]), int(item[2])]
            assert all(before[1] == after[0] for before, after in pairwise(parts))
            step = TILE if few else 32
            assert (parts[0][0], parts[-1][1]) == (tokens[:, 0].min() // step * step, tokens[:, 1].max() + 1)


@given(
    data=st.data(),
    rep=st.integers(1, 128),
    window=WINDOWS,
    heads=st.sampled_from([1, 2, 8]),
    rows=st.sampled_from(WIDE_ROWS),
)
def test_rows_of_wide_heads_are_covered_once(data: st.DataObject, rep: int, window: int, heads: int, rows: int) -> None:
    some = segments(data.draw(st.lists(st.tuples(st.integers(1, 90), POSITIONS), min_size=1, max_size=5)))
    tiles = wide_tiles(some, rep=rep, heads=heads, window=window, rows=rows)
    check(some, tiles, rep, window, heads, wide=True)
    padded = in_few_sizes(tiles, heads)
    assert padded.blocks == len(padded.items) >= len(tiles.items)
    assert not tiles.parts or padded.parts >= len(tiles.items)
    assert not padded.items[len(tiles.items) :].any()


@pytest.mark.parametrize("length", [100, 1000, 40_000])
def test_one_row_keeps_the_whole_device_busy(length: int) -> None:
    """A long row has many parts, but none so short that starting it costs more than what it does."""
    tiles = decode_tiles(segments([(1, length - 1)]), rep=4, heads=8, window=0)
    items = items_of(tiles)
    assert len(items) == min(DECODE_BLOCKS // 8, -(-length // 64))


def test_rows_of_any_length_are_dealt_out_evenly() -> None:
    """A long one among short ones keeps nobody waiting: blocks have the same share, whoever it is of."""
    tiles = decode_tiles(segments([(1, 32_767), *[(1, 1023)] * 7]), rep=4, heads=8, window=0)
    items = items_of(tiles)
    splits = items[:, 7] & 0xFFFF
    assert splits[items[:, 0] == 0][0] >= 27
    assert splits[items[:, 0] != 0].max() <= 2


def test_few_are_cut_of_many_rows() -> None:
    """No more than there are borders between blocks."""
    items = items_of(decode_tiles(segments([(1, 639)] * 256), rep=4, heads=8, window=0))
    assert len(items) < 256 + DECODE_BLOCKS // 8


def test_no_more_is_split_than_there_are_counters_for() -> None:
    """A launch of very many tiles is busy as it is."""
    some = segments([(9, 5000), *[(9, 100)] * 2100])
    tiles = prefill_tiles(some, rep=2, heads=32, window=0, dim=128)
    assert not tiles.parts
    check(some, tiles, 2, 0, 32)


def test_a_window_leaves_the_rest_alone() -> None:
    tiles = decode_tiles(segments([(1, 40_000)]), rep=4, heads=8, window=512)
    assert items_of(tiles)[:, 4].min() >= 40_000 - 512 - 15


@given(st.lists(st.tuples(st.integers(1, 300), POSITIONS), min_size=1, max_size=6), st.sampled_from([32, 96, 8192]))
def test_a_chunk_is_a_sequence_of_its_own(parts: list[tuple[int, int]], chunk: int) -> None:
    """Each token is once in one of them, behind as many others, and finds its own page there."""
    some = segments(parts)
    wanted = [
        (line[FIRST] + i, (line[POSITION] + i) % chunk, line[PAGES] + (line[POSITION] + i) // PAGE)
        for line in some
        for i in range(line[COUNT])
    ]
    found = [
        (line[FIRST] + i, line[POSITION] + i, line[PAGES] + (line[POSITION] + i) // PAGE)
        for line in within_chunks(some, chunk, PAGE)
        for i in range(line[COUNT])
    ]
    assert found == wanted
