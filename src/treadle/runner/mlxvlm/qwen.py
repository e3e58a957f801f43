"""Towers of Qwen-VL: mlx-vlm's layers, called with numbers of the grid that the host has counted.

mlx-vlm counts them on the device and reads them back, which waits for the step in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .encoded import Grid, Walk

Numbers = npt.NDArray[np.int32]


def walk(model: Any, pixels: Any, grid: Grid) -> Walk:
    """The tower of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5. Patches are rows of `pixels`, (n, 3 * frames * side**2),
    in the order in which they are merged, or (n, 3 * side**2) where the frames of each are one picture. `grid` has
    frames, rows and columns of patches."""
    tower = model.vision_tower
    places = patch_places(grid, tower.spatial_merge_size)
    lengths = np.repeat([rows * columns for _, rows, columns in grid], [frames for frames, *_ in grid])
    x, turns = _embed(tower.patch_embed, pixels), _turns(tower.rotary_pos_emb, places)
    del pixels
    if "pos_embed" in tower:
        x = x + _embedded(tower.pos_embed, *interpolation(grid, places, tower.num_grid_per_side))
    if not hasattr(tower, "get_window_index"):
        return (yield from _layers(tower, x, turns, _ends(lengths), _ends(lengths), range(len(tower.blocks))))
    unit = tower.spatial_merge_size**2
    order, windows = window_order(grid, tower.spatial_merge_size, tower.window_size // tower.patch_size)
    patches = mx.array((order[:, None] * unit + np.arange(unit)).reshape(-1))
    rows = yield from _layers(
        tower, x[patches], turns[patches], _ends(lengths), _ends(windows * unit), tower.fullatt_block_indexes
    )
    return rows[mx.array(np.argsort(order))]


def _embed(embedding: Any, pixels: Any) -> Any:
    return embedding(with_frames(pixels, embedding.temporal_patch_size, embedding.patch_size))


def with_frames(pixels: Any, frames: int, side: int) -> Any:
    """Patches (n, 3 * frames * side**2) of `pixels`, which have their frames or are one picture, (n, 3 * side**2)."""
    if pixels.shape[-1] != 3 * side**2:
        return pixels
    return mx.repeat(pixels.reshape(-1, 3, 1, side**2), frames, axis=2).reshape(len(pixels), -1)


def _layers(tower: Any, x: Any, turns: Any, views: Numbers, windows: Numbers, whole: Sequence[int]) -> Walk:
    """Layers over embedded patches; those that are not `whole` attend within windows. `views` and `windows` are the
    first places of each, and the end of the last."""
    deepest = list(getattr(tower, "deepstack_visual_indexes", ()))
    for i, layer in enumerate(tower.blocks):
        x = layer(x, cu_seqlens=views if i in whole else windows, rotary_pos_emb=turns)
        yield (x, tower.deepstack_merger_list[deepest.index(i)](x)) if i in deepest else (x,)
    return tower.merger(x)


def patch_places(grid: Grid, merge: int) -> Numbers:
    """Row and column (n, 2) of each patch in its view, in the order in which they are merged."""
    made = []
    for frames, rows, columns in grid:
        numbers = np.arange(rows * columns, dtype=np.int32).reshape(rows // merge, merge, columns // merge, merge)
        of_frame = np.stack(np.divmod(numbers.transpose(0, 2, 1, 3).reshape(-1), columns), axis=1)
        made.append(np.tile(of_frame, (frames, 1)))
    return np.concatenate(made)


def _turns(rotary: Any, places: Numbers) -> Any:
    """Angles (n, D) by which heads turn: half of them by the row of a patch, half by the column."""
    powers = mx.arange(0, rotary.dim, 2, dtype=mx.float32) / rotary.dim
    table = mx.outer(mx.arange(int(places.max()) + 1, dtype=mx.float32), 1.0 / rotary.theta**powers)
    return table[mx.array(places)].reshape(len(places), -1)


def interpolation(grid: Grid, places: Numbers, side: int) -> tuple[Numbers, npt.NDArray[np.float32]]:
    """The four of a `side` by `side` embeddings between which each patch lies (4, n), and the part of each (4, n)."""
    indices, parts, first = [], [], 0
    for frames, rows, columns in grid:
        of_view = places[first : first + frames * rows * columns]
        first += len(of_view)
        (top, bottom, down), (left, right, along) = (
            (low[at], high[at], part[at])
            for (low, high, part), at in zip((_between(rows, side), _between(columns, side)), of_view.T, strict=True)
        )
        indices.append(np.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right]))
        parts.append(np.stack([(1 - down) * (1 - along), (1 - down) * along, down * (1 - along), down * along]))
    return np.concatenate(indices, axis=1), np.concatenate(parts, axis=1)


def _between(count: int, side: int) -> tuple[Numbers, Numbers, npt.NDArray[np.float32]]:
    """The embeddings below and above each of `count` patches that are spread evenly over `side`, and how far it is from
    the lower one."""
    steps = np.arange(count, dtype=np.float32)
    at = steps / np.float32(max(1, count - 1)) * np.float32(side - 1)
    low = at.astype(np.int32)
    return low, np.minimum(low + 1, side - 1), at - low.astype(np.float32)


def _embedded(embedding: Any, indices: Numbers, parts: npt.NDArray[np.float32]) -> Any:
    """Embeddings (n, D) between four others."""
    found = embedding(mx.array(indices))
    found = found * mx.array(parts).astype(found.dtype)[:, :, None]
    return found[0] + found[1] + found[2] + found[3]


def window_order(grid: Grid, merge: int, side: int) -> tuple[Numbers, Numbers]:
    """The merged patches (m,) window by window, and how many each has; `side` is a window's, in patches."""
    orders, counts, first = [], [], 0
    for frames, rows, columns in grid:
        shape = frames, rows // merge, columns // merge
        places = first + np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        first += places.size
        for window in _windows(places, side // merge):
            orders.append(window)
            counts.append(len(window))
    return np.concatenate(orders), np.array(counts, np.int32)


def _windows(places: Numbers, side: int) -> Iterator[Numbers]:
    for frame in places:
        for row in range(0, frame.shape[0], side):
            for column in range(0, frame.shape[1], side):
                yield frame[row : row + side, column : column + side].reshape(-1)


def _ends(lengths: npt.NDArray[Any]) -> Numbers:
    """The first places of parts one behind the other, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
