"""Workspace memory that kernels use in turn."""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx


class LaunchOrder:
    """The order of launches that use one workspace, where they share inputs: each takes the result of the one before.

    MLX runs launches of a graph at the same time if none takes a result of the other, as with the products for queries
    and keys. Results are of `dtype`.
    """

    def __init__(self, dtype: Any) -> None:
        self._first = mx.zeros(1, dtype)
        mx.eval(self._first)
        self.last = self._first

    def restart(self) -> None:
        """Forget the last result, which belongs to another graph."""
        self.last = self._first


class Workspace:
    """An array of `dtype` that one launch after the other writes to; readers must come before the next launch. Its
    memory is taken at the first use, in the size that was reserved until then, and anew where more is reserved."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self._size = 1
        self._memory: Any | None = None
        self._views: dict[tuple[int, ...], Any] = {}

    def reserve(self, size: int) -> None:
        """Make sure of `size` numbers."""
        if size > self._size:
            self._size, self._memory = size, None
            self._views.clear()

    def array(self, *shape: int) -> Any:
        """The beginning of the memory in `shape`, at most as large as was reserved."""
        if self._memory is None:
            self._memory = mx.zeros(self._size, self.dtype)
        if shape not in self._views:
            assert prod(shape) <= self._size
            self._views[shape] = self._memory[: prod(shape)].reshape(shape)
            mx.eval(self._views[shape])
        return self._views[shape]
