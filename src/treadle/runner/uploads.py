"""Numbers of a step on their way from the host to the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

RING = 32
"""Arrays of one size, so that one is written again only when the steps that read it are long over: a step takes a few
of them, and two steps are on their way at most."""
_LEAST = 1024


class Uploads:
    """Puts small arrays into the device's own memory, several as one.

    Where the device can't share memory with the host, MLX leaves an array that is made on the host there, and every
    kernel that reads it fetches it again, microseconds at a time; and once it is freed, its memory is given to whatever
    is next of about its size, activations included. So each step's numbers are copied at once, out of arrays that are
    kept for ever and written again in place.
    """

    def __init__(self) -> None:
        self._rings: dict[int, deque[tuple[Any, npt.NDArray[np.uint32]]]] = {}

    def put(self, *arrays: npt.NDArray[np.int32]) -> list[Any]:
        """The arrays, of numbers that are not negative, on the device, int32. They must be evaluated, or forgotten,
        before RING more are put."""
        sizes = [array.size for array in arrays]
        host, view = self._next(max(_LEAST, 1 << (sum(sizes) - 1).bit_length()))
        view[: sum(sizes)] = np.concatenate([array.ravel() for array in arrays])
        device, found, start = host.astype(mx.int32), [], 0
        for array, size in zip(arrays, sizes, strict=True):
            found.append(device[start : start + size].reshape(array.shape))
            start += size
        return found

    def _next(self, size: int) -> tuple[Any, npt.NDArray[np.uint32]]:
        """An array of that size on the host, and its memory."""
        ring = self._rings.setdefault(size, deque())
        if len(ring) == RING:
            ring.rotate(-1)
        else:
            host = mx.array(np.zeros(size, np.uint32))
            ring.append((host, np.array(host, copy=False)))
        return ring[-1]
