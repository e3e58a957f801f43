"""Staging: copies of a step's small arrays from the host to the device, through a ring of pinned memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...core.compute_path import KernelName, KernelStatus
from .pinned_memory import PinnedMemory
from .self_test import self_tested

Put = Callable[..., list[Any]]
"""Makes MLX arrays of NumPy's: `direct`, or `Staging.put`."""

RING = 1 << 20
"""Numbers of a ring: many more than two steps take, so that no copy is ever waited for. Arrays of more than a quarter
of it are made anew. The page tables of 128 sequences of 16,000 tokens take a quarter of that, and the bitmasks of 32
rows over 262,144 tokens all of it."""
_ALIGNED = 4
"""Numbers that a kernel may read at once: each array begins at a multiple."""
_LEAST = 1024
_DTYPES = {np.dtype(np.int32): mx.int32, np.dtype(np.float32): mx.float32}


def direct(*arrays: npt.NDArray[Any]) -> list[Any]:
    """The arrays, in memory that MLX chooses."""
    return [mx.array(array) for array in arrays]


class Staging:
    """Copies small arrays, int32 or float32, to the device's own memory, several at once.

    Where the device can't share memory with the host, MLX leaves an array that was made on the host there, and every
    kernel that reads it fetches it again, microseconds at a time. Once it is freed, its memory is used for the next
    array of about its size, activations included. So each step's arrays are copied at once, out of a ring of memory
    that is never freed, and written again once it has been copied.
    """

    def __init__(self) -> None:
        self._next = 0
        self._copies: deque[tuple[int, int, Any]] = deque()

    @cached_property
    def _memory(self) -> PinnedMemory:
        return PinnedMemory(RING)

    def put(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        """The arrays, on the device."""
        starts = [0, *np.cumsum([-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]).tolist()]
        packed = np.zeros(starts[-1], np.uint32)
        for array, start in zip(arrays, starts[:-1], strict=True):
            packed[start : start + array.size] = array.ravel().view(np.uint32)
        device = self._copied(packed, max(_LEAST, 1 << (starts[-1] - 1).bit_length()))
        return [_part(device, start, array) for array, start in zip(arrays, starts[:-1], strict=True)]

    @property
    def shared(self) -> bool:
        """Whether the device reads the staging buffer in place."""
        return self._memory.shared

    def _copied(self, numbers: npt.NDArray[np.uint32], count: int) -> Any:
        """The numbers as int32, padded to `count`, in the device's memory; not evaluated yet."""
        if not self._memory.shared or count > RING // 4:
            return mx.array(np.pad(numbers, (0, count - len(numbers)))).astype(mx.int32)
        first = self._allocate(count)
        self._memory.view[first : first + len(numbers)] = numbers
        copy = self._memory.array[first : first + count].astype(mx.int32)
        self._copies.append((first, first + count, copy))
        return copy

    def _allocate(self, count: int) -> int:
        """The place of the next `count` numbers in the ring, whose last contents have been copied."""
        if self._next + count > RING:
            self._evaluate(self._next, RING)
            self._next = 0
        first, self._next = self._next, self._next + count
        self._evaluate(first, self._next)
        return first

    def _evaluate(self, first: int, last: int) -> None:
        """Evaluate the copies from that part of the ring; earlier ones are evaluated already."""
        while self._copies and self._copies[0][0] < last and self._copies[0][1] > first:
            mx.eval(self._copies.popleft()[2])


def _part(device: Any, start: int, array: npt.NDArray[Any]) -> Any:
    """The numbers from `start` on of `device`, int32, as an array like `array`. Each operation takes the host 1 us."""
    part = device[start : start + array.size]
    if array.dtype != np.int32:
        part = part.view(_DTYPES[array.dtype])
    return part if array.ndim == 1 else part.reshape(array.shape)


def staging_status() -> KernelStatus:
    """The outcome of a self-test: arrays arrive as they were, through memory that host and device share."""
    made = self_tested(KernelName.STAGING, Staging, _why_not, instead="MLX makes each step's arrays on the host")
    return made.status


def _why_not(staging: Staging) -> str:
    """Return what is wrong with arrays that arrive; empty if nothing is."""
    if not staging.shared:
        return "the device does not see what the host writes into shared memory"
    for turn in range(4):
        numbers, floats = np.arange(turn, turn + 77, dtype=np.int32), np.linspace(-1, turn, 33, dtype=np.float32)
        arrived = staging.put(numbers, floats)
        if not all(np.array_equal(sent, np.array(one)) for sent, one in zip((numbers, floats), arrived, strict=True)):
            return "arrays do not arrive as they were sent"
    return ""
