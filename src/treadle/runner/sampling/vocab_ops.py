"""Operations on rows as long as a vocabulary, at the speed that MLX's CPU backend can have too."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

_LOG2_E = math.log2(math.e)


def exp(values: Any) -> Any:
    """e to the power of `values`: three times as fast as mx.exp on the CPU, and the same elsewhere."""
    return mx.power(2.0, values * _LOG2_E)


def log_sum_exp(values: Any) -> Any:
    """The logarithm (R, 1) of each row's sum of exponentials; `values` (R, N) are float32, some of them finite."""
    largest = mx.max(values, axis=-1, keepdims=True)
    return largest + mx.log(mx.sum(exp(values - largest), axis=-1, keepdims=True))


def top_indices(values: Any, count: int) -> Any:
    """Indices (R, count) of the `count` largest of each row of `values` (R, N), largest first, and of equal ones the
    first: which those are does not depend on how many others are asked for.

    The `count` blocks with the largest maxima hold them all, so only those are looked into. An index can be N or more
    where a row has fewer than `count` entries above -inf.
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
    """Places (R, count), in any order, of the largest of `values` (R, N), and of equal ones of the first."""
    some = mx.argpartition(-values, count - 1, axis=-1)[:, :count]
    least = mx.min(mx.take_along_axis(values, some, axis=-1), axis=-1, keepdims=True)
    length = values.shape[-1]
    order = mx.where(values > least, -1, mx.where(values == least, mx.arange(length), length))
    return mx.argpartition(order, count - 1, axis=-1)[:, :count]
