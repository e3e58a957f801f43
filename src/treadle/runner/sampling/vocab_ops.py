"""Operations on rows of vocabulary length that are also fast on MLX's CPU backend."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

_LOG2_E = math.log2(math.e)


def exp(values: Any) -> Any:
    """Return e to the power of `values`. On the CPU this takes a third of mx.exp's time."""
    return mx.power(2.0, values * _LOG2_E)


def log_sum_exp(values: Any) -> Any:
    """Return the logarithm (R, 1) of each row's sum of exponentials. `values` (R, N) are float32, not all infinite."""
    largest = mx.max(values, axis=-1, keepdims=True)
    return largest + mx.log(mx.sum(exp(values - largest), axis=-1, keepdims=True))


def top_indices(values: Any, count: int) -> Any:
    """Return the indices (R, count) of the largest of each row of `values` (R, N), in descending order; of equal
    values the lower index comes first, whatever `count` is.

    The `count` blocks with the largest maxima contain all of them, so only these are sorted. An index may be N or more
    if a row has fewer than `count` entries above -inf.
    """
    rows, length = values.shape
    if 4 * count >= length:
        return mx.argsort(-values, axis=-1)[:, :count].astype(mx.int32)
    block = 1 << int(math.log2(math.sqrt(length / count)))
    padded = mx.pad(values, [(0, 0), (0, -length % block)], constant_values=-math.inf)
    blocks = padded.reshape(rows, -1, block)
    which = mx.sort(_largest(mx.max(blocks, axis=-1), count), axis=-1)
    inside = mx.take_along_axis(blocks, which[:, :, None], axis=1).reshape(rows, -1)
    indices = (which[:, :, None] * block + mx.arange(block)).reshape(rows, -1)
    best = _largest(inside, count)
    indices = mx.sort(mx.take_along_axis(indices, best, axis=-1), axis=-1)
    order = mx.argsort(-mx.take_along_axis(padded, indices, axis=-1), axis=-1)
    return mx.take_along_axis(indices, order, axis=-1).astype(mx.int32)


def _largest(values: Any, count: int) -> Any:
    """Return the places (R, count), in any order, of the largest of `values` (R, N); of equal values the first."""
    some = mx.argpartition(-values, count - 1, axis=-1)[:, :count]
    least = mx.min(mx.take_along_axis(values, some, axis=-1), axis=-1, keepdims=True)
    length = values.shape[-1]
    order = mx.where(values > least, -1, mx.where(values == least, mx.arange(length), length))
    return mx.argpartition(order, count - 1, axis=-1)[:, :count]
