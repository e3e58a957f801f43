"""A vision tower that is run in pieces: a few layers at a time.

An image's graph is built at once, as MLX computes nothing before it is asked to. Each layer notes what it returns;
computing those in turn computes the tower piece by piece.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .families import Encoded, Grid, VisionFamily


class _Noted(nn.Module):  # type: ignore[misc]
    """A layer of a tower that notes what it returns in `notes`."""

    def __init__(self, block: Any, notes: _Notes) -> None:
        super().__init__()
        self.block = block
        self._notes = notes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lengths = kwargs.get("cu_seqlens")
        if lengths is not None:  # each layer would wait for the device to read it
            kwargs["cu_seqlens"] = self._notes.on_host(lengths)
        states = self.block(*args, **kwargs)
        self._notes.states.append(states)
        return states


class _Notes:
    """What the layers returned for the image whose graph is being built, and arrays that were read for it."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self._read: list[tuple[Any, Any]] = []

    def on_host(self, array: Any) -> Any:
        for known, numbers in self._read:
            if known is array:
                return numbers
        self._read.append((array, np.array(array)))
        return self._read[-1][1]

    def take(self) -> list[Any]:
        states, self.states, self._read = self.states, [], []
        return states


class LazyImage:
    """The graph of an image's features: `states` are what its layers return, in order."""

    def __init__(self, states: list[Any], encoded: Encoded) -> None:
        self._states: list[Any] = states
        self._encoded = encoded
        self.done = 0

    def run(self, count: int) -> tuple[list[Any], Encoded | None]:
        """The arrays to compute next, for `count` layers more, and the features once these are the last ones. Nothing
        of the layers before is kept."""
        for layer in range(self.done, self.done + count - 1):
            self._states[layer] = None
        self.done += count
        last, self._states[self.done - 1] = self._states[self.done - 1], None
        if self.done < len(self._states):
            return [last], None
        return [self._encoded.rows, *self._encoded.deepstack], self._encoded


class Tower:
    """The parts of mlx-vlm's `model` that encode images, with their weights. Features are of type `dtype`, and divided
    by `factor`."""

    def __init__(self, model: Any, family: VisionFamily, dtype: Any, factor: float = 1.0) -> None:
        self._model = model
        self._family = family
        self._dtype = dtype
        self._factor = factor
        self._notes = _Notes()
        first = getattr(model, family.parts[0])
        *path, name = family.blocks.split(".")
        holder = reduce(getattr, path, first)
        blocks = list(getattr(holder, name))
        setattr(holder, name, [_Noted(block, self._notes) for block in blocks])
        self.layers = len(blocks)

    def image(self, pixels: Any, grid: Grid) -> LazyImage:
        """The graph of the features of an image. Raises ValueError where they would not be computed by all layers."""
        try:
            given = mx.array(pixels)
            given = given.astype(self._dtype) if self._family.casts else given
            encoded = self._family.encode(self._model, given, grid)
        finally:
            states = self._notes.take()
        if len(states) != self.layers:
            raise ValueError(f"{len(states)} of {self.layers} layers of the vision tower are used")
        rows = encoded.rows if self._factor == 1.0 else encoded.rows / self._factor
        cast = [array.astype(self._dtype) for array in (rows, *encoded.deepstack)]
        return LazyImage(states, Encoded(cast[0], tuple(cast[1:])))
