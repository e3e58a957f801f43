"""Staging: copies of a step's small arrays from the host to the device, through a ring of pinned memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
RESERVE = 1 << 18
"""Numbers of the memory for arrays that are made ahead: what a step takes at most of the ring, or it is not made so."""
_ALIGNED = 4
"""Numbers that a kernel may read at once: each array begins at a multiple."""
_LEAST = 1024
_DTYPES = {np.dtype(np.int32): mx.int32, np.dtype(np.float32): mx.float32}


def direct(*arrays: npt.NDArray[Any]) -> list[Any]:
    """The arrays, in memory that MLX chooses."""
    return [mx.array(array) for array in arrays]


_Layout = Sequence[tuple[tuple[int, ...], Any]]
"""Shapes and dtypes of arrays that are put together."""


@dataclass(frozen=True)
class _Reserved:
    """The `arrays` of a `put` to come: parts of a `copy` of the reserve's numbers from `first` on."""

    layout: _Layout
    first: int
    copy: Any
    arrays: list[Any]


class Staging:
    """Copies small arrays, int32 or float32, to the device's own memory, several at once.

    Where the device can't share memory with the host, MLX leaves an array that was made on the host there, and every
    kernel that reads it fetches it again, microseconds at a time. Once it is freed, its memory is used for the next
    array of about its size, activations included. So each step's arrays are copied at once, out of a ring of memory
    that is never freed, and written again once it has been copied.

    Arrays may be there before their numbers are: those of a pass that is likely to come are reserved, and its graph is
    built on them, while the device computes the pass before.
    """

    def __init__(self) -> None:
        self._next = 0
        self._copies: deque[tuple[int, int, Any]] = deque()
        self._noted: list[tuple[_Layout, list[Any]]] = []
        self._notes = False
        self._reserved: deque[_Reserved] = deque()
        self._filled: list[Any] = []

    @cached_property
    def _memory(self) -> PinnedMemory:
        return PinnedMemory(RING)

    @cached_property
    def _reserve(self) -> PinnedMemory:
        return PinnedMemory(RESERVE)

    def put(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        """The arrays, on the device: reserved ones, where such were expected."""
        layout = [(array.shape, array.dtype) for array in arrays]
        *starts, end = _starts(arrays)
        expected = self._expected(layout) if self._reserved else None
        if expected is None:
            made = _parts(self._copied(arrays, starts, _padded(end)), layout, starts)
        else:
            _write(self._reserve.view[expected.first :], arrays, starts)
            made = expected.arrays
        if self._notes:
            self._noted.append((layout, made))
        return made

    def note(self, on: bool) -> None:
        """Keep track of what is put from now on, for `reserve`; or no longer, and keep what was put so far."""
        self._notes = on
        if on:
            self._noted = []

    def reserve(self) -> dict[int, Any]:
        """Make the arrays of the next calls of `put` ahead, which are expected to be like those that were noted. Return
        them by the ids of the arrays that those calls returned; none where there is no room.

        They must not be evaluated before they are put. Then their numbers are written to the reserve, from which they
        are copied: so whatever was put there after the reservation before has to be evaluated, or about to be.
        """
        self._reserved.clear()
        starts = [_starts(arrays) for _, arrays in self._noted]
        firsts = [0, *accumulate(_padded(some[-1]) for some in starts)]
        found: dict[int, Any] = {}
        if firsts[-1] > RESERVE or not self._reserve.shared:
            return found
        for (layout, arrays), some, first, end in zip(self._noted, starts, firsts[:-1], firsts[1:], strict=True):
            copy = self._reserve.array[first:end].astype(mx.int32)
            made = _parts(copy, layout, some[:-1])
            self._reserved.append(_Reserved(layout, first, copy, made))
            found |= {id(old): new for old, new in zip(arrays, made, strict=True)}
        return found

    def _expected(self, layout: _Layout) -> _Reserved | None:
        """The reserved arrays of that layout, whose numbers are to be written now; None where others are next, and no
        more of them are expected then."""
        reserved = self._reserved.popleft()
        if reserved.layout != layout:
            self._reserved.clear()
            return None
        if not reserved.first:
            mx.eval(self._filled)
            self._filled.clear()
        self._filled.append(reserved.copy)
        return reserved

    @property
    def shared(self) -> bool:
        """Whether the device reads the staging buffer in place."""
        return self._memory.shared

    def _copied(self, arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int], count: int) -> Any:
        """The arrays' numbers as `count` of int32, in the device's memory; not evaluated yet."""
        if not self._memory.shared or count > RING // 4:
            numbers = np.zeros(count, np.uint32)
            _write(numbers, arrays, starts)
            return mx.array(numbers).astype(mx.int32)
        first = self._allocate(count)
        _write(self._memory.view[first : first + count], arrays, starts)
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


def _starts(arrays: Sequence[Any]) -> list[int]:
    """Where each array begins among the numbers that are copied, and behind them the end of all."""
    return [0, *accumulate(-(-array.size // _ALIGNED) * _ALIGNED for array in arrays)]


def _write(numbers: npt.NDArray[np.uint32], arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int]) -> None:
    for array, start in zip(arrays, starts, strict=True):
        numbers[start : start + array.size] = array.reshape(-1).view(np.uint32)


def _padded(count: int) -> int:
    """The count of numbers to copy where there are `count`: few lengths, as each is another kernel's."""
    return max(_LEAST, 1 << (count - 1).bit_length())


def _parts(device: Any, layout: _Layout, starts: Sequence[int]) -> list[Any]:
    """The numbers of `device`, int32, as arrays of that layout, which begin at `starts`. Each operation takes the host
    1 us."""
    made = []
    for (shape, dtype), start in zip(layout, starts, strict=True):
        part = device[start : start + math.prod(shape)]
        if dtype != np.int32:
            part = part.view(_DTYPES[dtype])
        made.append(part if len(shape) == 1 else part.reshape(shape))
    return made


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
