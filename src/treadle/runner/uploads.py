"""Numbers of a step on their way from the host to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Put = Callable[..., list[Any]]
"""Makes arrays of NumPy's: `plain`, or an `Uploads`' own."""

RING = 32
"""Arrays of one size. A step takes a few of them, and two steps are on their way at most, so when one is written again
what read it is long over."""
_LEAST = 1024
_DTYPES = {np.dtype(np.int32): mx.int32, np.dtype(np.float32): mx.float32}


def plain(*arrays: npt.NDArray[Any]) -> list[Any]:
    """The arrays, where MLX makes them."""
    return [mx.array(array) for array in arrays]


@dataclass
class _Place:
    """An array on the host, the same memory as NumPy has it, and what is copied out of it."""

    host: Any
    view: npt.NDArray[np.uint32]
    copy: Any = None


class Uploads:
    """Puts small arrays, int32 or float32, into the device's own memory, several as one.

    Where the device can't share memory with the host, MLX leaves an array that is made on the host there, and every
    kernel that reads it fetches it again, microseconds at a time; and once it is freed, its memory is given to whatever
    is next of about its size, activations included. So each step's numbers are copied at once, out of arrays that are
    kept for ever and written again in place, once what was to be copied out of them has been.
    """

    def __init__(self) -> None:
        self._rings: dict[int, deque[_Place]] = {}
        self._in_place = _is_shared(mx.array(np.zeros(2, np.uint32)))

    def put(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        """The arrays, on the device."""
        sizes = [array.size for array in arrays]
        packed = np.zeros(max(_LEAST, 1 << (sum(sizes) - 1).bit_length()), np.uint32)
        packed[: sum(sizes)] = np.concatenate([array.ravel().view(np.uint32) for array in arrays])
        device, found, start = self._copied(packed), [], 0
        for array, size in zip(arrays, sizes, strict=True):
            found.append(device[start : start + size].view(_DTYPES[array.dtype]).reshape(array.shape))
            start += size
        return found

    def _copied(self, numbers: npt.NDArray[np.uint32]) -> Any:
        """The same numbers, int32, in memory of their own; not evaluated yet."""
        if not self._in_place:
            return mx.array(numbers).astype(mx.int32)
        ring = self._rings.setdefault(len(numbers), deque())
        if len(ring) < RING:
            host = mx.array(numbers)
            place = _Place(host, np.array(host, copy=False))
        else:
            place = ring.popleft()
            mx.eval(place.copy)
            place.view[:] = numbers
        place.copy = place.host.astype(mx.int32)
        ring.append(place)
        return place.copy


def _is_shared(host: Any) -> bool:
    """Whether NumPy can write to the array's own memory."""
    try:
        view = np.array(host, copy=False)
        view[-1] = 1
    except ValueError:  # only to a copy of it, or not at all
        return False
    return bool(host[-1].item() == 1)
