"""Numbers of a step on their way from the host to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Put = Callable[..., list[Any]]
"""Makes arrays of NumPy's: `plain`, or an `Uploads`' own."""

RING = 32
"""Arrays of one size, so that one is written again only when the steps that read it are long over: a step takes a few
of them, and two steps are on their way at most."""
_LEAST = 1024


_DTYPES = {np.dtype(np.int32): mx.int32, np.dtype(np.float32): mx.float32}


def plain(*arrays: npt.NDArray[Any]) -> list[Any]:
    """The arrays, where MLX makes them."""
    return [mx.array(array) for array in arrays]


class Uploads:
    """Puts small arrays into the device's own memory, several as one.

    Where the device can't share memory with the host, MLX leaves an array that is made on the host there, and every
    kernel that reads it fetches it again, microseconds at a time; and once it is freed, its memory is given to whatever
    is next of about its size, activations included. So each step's numbers are copied at once, out of arrays that are
    kept for ever and written again in place.
    """

    def __init__(self) -> None:
        self._rings: dict[int, deque[tuple[Any, npt.NDArray[np.uint32]]]] = {}
        self._in_place = _is_shared(mx.array(np.zeros(2, np.uint32)))

    def put(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        """The arrays, int32 or float32, on the device. They must be evaluated, or forgotten, before RING more are
        put."""
        sizes = [array.size for array in arrays]
        packed = np.zeros(max(_LEAST, 1 << (sum(sizes) - 1).bit_length()), np.uint32)
        packed[: sum(sizes)] = np.concatenate([array.ravel().view(np.uint32) for array in arrays])
        device, found, start = self._on_host(packed).astype(mx.int32), [], 0
        for array, size in zip(arrays, sizes, strict=True):
            found.append(device[start : start + size].view(_DTYPES[array.dtype]).reshape(array.shape))
            start += size
        return found

    def _on_host(self, numbers: npt.NDArray[np.uint32]) -> Any:
        if not self._in_place:
            return mx.array(numbers)
        ring = self._rings.setdefault(len(numbers), deque())
        if len(ring) < RING:
            host = mx.array(numbers)
            ring.append((host, np.array(host, copy=False)))
            return host
        ring.rotate(-1)
        host, view = ring[-1]
        view[:] = numbers
        return host


def _is_shared(host: Any) -> bool:
    """Whether NumPy can write to the array's own memory."""
    try:
        view = np.array(host, copy=False)
        view[-1] = 1
    except ValueError:  # only to a copy of it, or not at all
        return False
    return bool(host[-1].item() == 1)
