"""A vision tower that is run in pieces: a few layers at a time.

An image's graph is built at once, as MLX computes nothing before it is asked to. Each layer notes what it returns;
computing those in turn computes the tower piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .encoded import Encoded, Grid
from .families import VisionFamily
from .levels import values_of


class _Noted(nn.Module):  # type: ignore[misc]
    """A layer of a tower that adds what it returns to `states`."""

    def __init__(self, block: Any, states: list[Any]) -> None:
        super().__init__()
        self.block = block
        self._states = states

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._states.append(self.block(*args, **kwargs))
        return self._states[-1]


class LazyImage:
    """The graph of an image's features: `states` are what its layers return, in order. The last piece is what comes
    behind them: a projector takes as long as a layer or two."""

    def __init__(self, states: list[Any], encoded: Encoded) -> None:
        self._states: list[Any] = states
        self._encoded = encoded
        self.done = 0

    def run(self, count: int) -> tuple[list[Any], Encoded | None]:
        """The arrays to compute next, for `count` pieces more, and the features once these are the last ones. Nothing
        of the layers before is kept."""
        start, self.done = self.done, self.done + count
        if self.done > len(self._states):
            self._states.clear()
            return [self._encoded.rows, *self._encoded.deepstack], self._encoded
        known = zip(self._encoded.deepstack, self._encoded.after, strict=True)
        arrays = [array for array, after in known if start < after <= self.done]
        arrays.append(self._states[self.done - 1])
        self._states[start : self.done] = [None] * count
        return arrays, None


class Tower:
    """The parts of mlx-vlm's `model` that encode images, with their weights. Features are of type `dtype`, and divided
    by `factor`. An image is encoded in up to `pieces`, one more than there are `layers`."""

    def __init__(self, model: Any, family: VisionFamily, dtype: Any, factor: float = 1.0) -> None:
        self._model = model
        self._family = family
        self._dtype = dtype
        self._factor = factor
        self._states: list[Any] = []  # of the image whose graph is being built
        first = getattr(model, family.parts[0])
        *path, name = family.blocks.split(".")
        holder = reduce(getattr, path, first)
        blocks = list(getattr(holder, name))
        setattr(holder, name, [_Noted(block, self._states) for block in blocks])
        self.layers = len(blocks)
        self.pieces = self.layers + 1

    def image(self, pixels: Any, grid: Grid, table: Any | None = None) -> LazyImage:
        """The graph of the features of an image, whose `pixels` are levels where there is a `table` of their values.
        Raises ValueError where they would not be computed by all layers."""
        try:
            given = mx.array(pixels if table is None else table)
            given = given.astype(self._dtype) if self._family.casts else given
            given = given if table is None else values_of(mx.array(pixels), given, grid)
            encoded = self._family.encode(self._model, given, grid)
        finally:
            states = list(self._states)
            self._states.clear()
        if len(states) != self.layers:
            raise ValueError(f"{len(states)} of {self.layers} layers of the vision tower are used")
        rows = encoded.rows if self._factor == 1.0 else encoded.rows / self._factor
        cast = [array.astype(self._dtype) for array in (rows, *encoded.deepstack)]
        return LazyImage(states, Encoded(cast[0], tuple(cast[1:]), encoded.after))

    def count(self, shape: Sequence[int], grid: Grid) -> int:
        """How many features an image of this shape and grid has."""
        _, encoded = self.image(mx.zeros(shape), grid).run(self.pieces)
        assert encoded is not None, "all pieces give the features"
        return int(encoded.rows.shape[0])
