"""Pinned host memory, which a device reads and writes in place."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5  # advice to CUDA's driver
_HOST = -1


class PinnedMemory:
    """`words` numbers of 32 bits: `array` for MLX, uint32, and `view` for NumPy, which are the same memory where they
    are `shared`.

    CUDA moves memory that host and device share to whoever uses it, a page fault of some 50 us each time a step's
    numbers go to the device or its picks come back. So the driver is asked to leave this memory where it is, and to let
    the device reach it over the bus. Elsewhere, or where it refuses, it is memory like any other, only slower.
    """

    def __init__(self, words: int) -> None:
        self.array: Any = mx.array(np.zeros(words, np.uint32))
        self.view: npt.NDArray[np.uint32] = np.zeros(words, np.uint32)
        self.shared = False
        with suppress(ValueError):  # NumPy gets a copy, or nothing at all
            self.view = np.array(self.array, copy=False)
            self.view[-1] = 1
            self.shared = bool(self.array[-1].item() == 1)
            self.view[-1] = 0
        self.stays = _stay(self.view.ctypes.data, self.view.nbytes)


def _stay(address: int, size: int) -> bool:
    """Whether CUDA's driver keeps that memory on the host, for device 0 to reach it there."""
    try:
        advise = ctypes.CDLL("libcuda.so.1").cuMemAdvise
    except (OSError, AttributeError):
        return False
    where = ctypes.c_uint64(address), ctypes.c_size_t(size)
    return not any([advise(*where, _PREFERRED_LOCATION, _HOST), advise(*where, _ACCESSED_BY, 0)])
