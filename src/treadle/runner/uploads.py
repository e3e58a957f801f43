"""Numbers of a step on their way from the host to the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_KEPT = 8
_LEAST = 1024


class Uploads:
    """Puts small arrays into the device's own memory, several as one.

    Where the device can't share memory with the host, MLX leaves an array made on the host in the host's memory, from
    where every kernel that reads it fetches it again, microseconds at a time; and once freed, that memory is given to
    whatever is next of about its size, activations included. So each step's numbers are copied at once, and the host's
    copies are kept until no step reads them any more and the next one takes their place.
    """

    def __init__(self) -> None:
        self._kept: deque[Any] = deque(maxlen=_KEPT)

    def put(self, *arrays: npt.NDArray[np.int32]) -> list[Any]:
        """The arrays, of numbers that are not negative, on the device, int32."""
        sizes = [array.size for array in arrays]
        packed = np.zeros(max(_LEAST, 1 << (sum(sizes) - 1).bit_length()), np.uint32)
        packed[: sum(sizes)] = np.concatenate([array.ravel() for array in arrays])
        if len(self._kept) == _KEPT:
            self._kept.popleft()
        self._kept.append(mx.array(packed))
        device, found, start = self._kept[-1].astype(mx.int32), [], 0
        for array, size in zip(arrays, sizes, strict=True):
            found.append(device[start : start + size].reshape(array.shape))
            start += size
        return found
