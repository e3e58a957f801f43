"""A vision tower that is run in pieces: a few layers at a time.

MLX computes nothing before it is asked to. So the graph of an image is built layer by layer, as pieces are asked for,
and computing what the last of them returns computes a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import mlx.core as mx

from .encoded import Encoded, Grid, Walk
from .families import VisionFamily
from .levels import values_of


class LazyImage:
    """Features of an image, layer by layer of `walk`, as `typed` by that. The last piece is what comes behind the
    layers: a projector takes as long as a layer or two."""

    def __init__(self, walk: Walk, typed: Callable[[Any], Any]) -> None:
        self._walk = walk
        self._typed = typed
        self._deepstack: list[Any] = []
        self.done = 0

    def run(self, count: int) -> tuple[list[Any], Encoded | None]:
        """The arrays to compute next, for `count` pieces more, and the features once these are the last ones. Nothing
        of the layers before is kept."""
        known, state = len(self._deepstack), None
        for _ in range(count):
            self.done += 1
            try:
                state, *deepstack = next(self._walk)
            except StopIteration as end:
                encoded = Encoded(self._typed(end.value), tuple(self._deepstack))
                return [encoded.rows, *encoded.deepstack], encoded
            self._deepstack += map(self._typed, deepstack)
        return [*self._deepstack[known:], state], None


class Tower:
    """The parts of mlx-vlm's `model` that encode images, with their weights. Features are of type `dtype`, and divided
    by `factor`. An image is encoded in up to `pieces`, one more than there are `layers`."""

    def __init__(self, model: Any, family: VisionFamily, dtype: Any, factor: float = 1.0) -> None:
        self._model = model
        self._family = family
        self._dtype = dtype
        self._factor = factor
        self.layers = len(reduce(getattr, family.blocks.split("."), getattr(model, family.parts[0])))
        self.pieces = self.layers + 1

    def image(self, pixels: Any, grid: Grid, table: Any | None = None) -> LazyImage:
        """The features of an image, whose `pixels` are levels where there is a `table` of their values."""
        given = mx.array(pixels if table is None else table)
        given = given.astype(self._dtype) if self._family.casts else given
        given = given if table is None else values_of(mx.array(pixels), given, grid)
        return LazyImage(self._family.walk(self._model, given, grid), self._typed)

    def _typed(self, features: Any) -> Any:
        return (features if self._factor == 1.0 else features / self._factor).astype(self._dtype)

    def blank(self, shape: Sequence[int], grid: Grid) -> Encoded:
        """The features of an image of zeros, which are not computed: how many there are, and of what width. Raises what
        mlx-vlm's modules raise where they do not fit each other."""
        _, encoded = self.image(mx.zeros(shape), grid).run(self.pieces)
        assert encoded is not None, "all pieces give the features"
        return encoded

    def count(self, shape: Sequence[int], grid: Grid) -> int:
        """How many features an image of this shape and grid has."""
        return int(self.blank(shape, grid).rows.shape[0])
