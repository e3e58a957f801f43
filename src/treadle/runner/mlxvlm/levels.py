"""Values of pixels that come as levels of colours, by a table: exactly those that a front would have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

TABLE = (3, 256)
"""The shape of a table: the values of the levels of each channel."""


def values_of(levels: Any, table: Any, grid: Sequence[Sequence[int]]) -> Any:
    """The values of uint8 `levels`, an array as a family's tower takes it: (views, 3, height, width); patches (n, 3 *
    values); or patches of views (views, n, values * 3), of which those behind the `grid` are padding, and 0."""
    channel = mx.arange(3, dtype=mx.uint16) * 256
    shape = levels.shape
    if levels.ndim == 3:
        by_channel, channel = levels.reshape(-1, 3), channel[None]
    else:
        by_channel, channel = levels.reshape(shape[0], 3, -1), channel[None, :, None]
    values = table.reshape(-1)[by_channel.astype(mx.uint16) + channel].reshape(shape)
    if levels.ndim != 3:
        return values
    real = np.arange(shape[1]) < np.array([rows * columns for rows, columns in grid])[:, None]
    return mx.where(mx.array(real)[:, :, None], values, mx.zeros((), values.dtype))
