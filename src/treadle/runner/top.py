"""The largest entries of long rows without sorting them."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx


def top_indices(values: Any, count: int) -> Any:
    """Indices (R, count) of the `count` largest of each row of `values` (R, N), largest first, ties by index.

    The `count` blocks with the largest maxima hold them all, so only those are looked into. An index can be N or more
    where a row has fewer than `count` entries above -inf.
    """
    rows, length = values.shape
    if 4 * count >= length:
        return mx.argsort(-values, axis=-1)[:, :count].astype(mx.int32)
    block = 1 << int(math.log2(math.sqrt(length / count)))
    padded = mx.pad(values, [(0, 0), (0, -length % block)], constant_values=-math.inf)
    blocks = padded.reshape(rows, -1, block)
    which = _largest(mx.max(blocks, axis=-1), count)
    inside = mx.take_along_axis(blocks, which[:, :, None], axis=1).reshape(rows, -1)
    indices = (which[:, :, None] * block + mx.arange(block)).reshape(rows, -1)
    best = _largest(inside, count)
    indices = mx.sort(mx.take_along_axis(indices, best, axis=-1), axis=-1)
    order = mx.argsort(-mx.take_along_axis(padded, indices, axis=-1), axis=-1)
    return mx.take_along_axis(indices, order, axis=-1).astype(mx.int32)


def _largest(values: Any, count: int) -> Any:
    return mx.argpartition(-values, count - 1, axis=-1)[:, :count]
