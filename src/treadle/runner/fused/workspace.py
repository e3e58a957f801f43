"""Memory that kernels use in turn, each before the next one needs it."""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx


class Workspace:
    """Numbers of `dtype` that one launch after the other writes to: what reads them must come before the next launch.
    Taken at the first use, as many as were reserved until then."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self._size = 1
        self._memory: Any | None = None
        self._views: dict[tuple[int, ...], Any] = {}

    def reserve(self, size: int) -> None:
        """Room for so many numbers will be needed."""
        assert self._memory is None or size <= self._size, "the memory is taken already"
        self._size = max(self._size, size)

    def array(self, *shape: int) -> Any:
        """The beginning of the memory, in that shape; no more than was reserved."""
        if self._memory is None:
            self._memory = mx.zeros(self._size, self.dtype)
        if shape not in self._views:
            assert prod(shape) <= self._size
            self._views[shape] = self._memory[: prod(shape)].reshape(shape)
            mx.eval(self._views[shape])
        return self._views[shape]
