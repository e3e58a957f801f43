"""Readback of sampled tokens from the device to the host, by a kernel that writes pinned memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...core.compute_path import KernelName
from .cuda import CudaKernel, NewKernel
from .pinned_memory import PinnedMemory
from .self_test import SelfTested, self_tested

MOST = 4096
_PLACES = 8
_THREADS = 256
_BODY = """
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int most = place_shape[0] / 2, count = first_shape[0];
  if (i < most) filled[i] = i < count ? first[i] : 0;
  if (i >= count) return;
  int* to = const_cast<int*>(place);
  to[i] = first[i];
  to[most + i] = second[i];
"""


@dataclass(frozen=True)
class PendingReadback:
    """Two arrays of `count` numbers that are in `view` once `filled` is evaluated. `filled` is the first of them,
    padded to MOST with zeros."""

    filled: Any
    view: npt.NDArray[np.int32]
    count: int

    def read(self) -> tuple[list[int], list[int]]:
        """Wait for both arrays. They stay until _PLACES more have been sent."""
        mx.eval(self.filled)
        return self.view[0, : self.count].tolist(), self.view[1, : self.count].tolist()


class Readback:
    """Copies small arrays to pinned host memory by a kernel.

    When the host reads an array of the device's, MLX allocates shared memory, copies the array and waits: 0.2 ms of the
    host for 128 numbers, and the next array in that memory lives on the host.
    """

    def __init__(self, kernel: NewKernel = CudaKernel) -> None:
        self._memory = PinnedMemory(_PLACES * 2 * MOST)
        self._views = self._memory.view.view(np.int32).reshape(_PLACES, 2, MOST)
        flat = self._memory.array.view(mx.int32)
        self._places = [flat[start : start + 2 * MOST] for start in range(0, flat.size, 2 * MOST)]
        mx.eval(self._places)
        self._kernel = kernel("land", ["first", "second", "place"], ["filled"], _BODY)
        self._sent = 0

    def send(self, first: Any, second: Any | None = None) -> PendingReadback | None:
        """The readback of `first` and `second` (B,), int32, not evaluated yet; None where B exceeds MOST."""
        count = first.shape[0]
        if count > MOST:
            return None
        place = self._sent % _PLACES
        self._sent += 1
        (filled,) = self._kernel(
            [first, first if second is None else second, self._places[place]],
            [],
            blocks=(-(-MOST // _THREADS), 1),
            threads=_THREADS,
            shapes=[(MOST,)],
            dtypes=[mx.int32],
        )
        return PendingReadback(filled, self._views[place], count)


def readback(kernel: NewKernel = CudaKernel) -> SelfTested[Readback]:
    """The readback kernel with the outcome of its self-test."""
    instead = "mx.array copies bring tokens to the host (about 0.2 ms a step slower)"
    return self_tested(KernelName.READBACK, lambda: Readback(kernel), _why_not, instead=instead)


def _why_not(made: Readback) -> str:
    """Return what is wrong with the numbers that arrive; empty if nothing is."""
    for turn in range(2 * _PLACES):
        first, second = mx.arange(turn, turn + 300), mx.arange(300) * turn
        landed = made.send(first.astype(mx.int32), second.astype(mx.int32))
        assert landed is not None
        wanted = list(range(turn, turn + 300)), [i * turn for i in range(300)]
        if landed.read() != wanted or landed.filled.tolist() != wanted[0] + [0] * (MOST - 300):
            return "what arrived is not what was sent"
    return ""
