"""Memory that NumPy writes and MLX reads, and what CUDA's driver is asked about it."""

from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle.runner.device.pinned_memory import PinnedMemory


def test_what_numpy_writes_is_what_mlx_reads() -> None:
    memory = PinnedMemory(1000)
    assert memory.shared
    assert not memory.array.astype(mx.int32).any().item()
    memory.view[3] = 7
    assert memory.array[3].item() == 7
    assert memory.array.tolist() == memory.view.tolist()


def test_where_only_a_copy_can_be_had_it_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def array(source: Any, **how: Any) -> Any:
        if how.get("copy") is False:
            raise ValueError("a copy is needed")
        return np.asarray(source)

    monkeypatch.setattr(np, "array", array)
    memory = PinnedMemory(8)
    assert not memory.shared
    memory.view[0] = 1
    assert memory.array[0].item() == 0


class Driver:
    """CUDA's, as far as it takes advice: every address, size, advice and place it was given."""

    def __init__(self, *answers: int) -> None:
        self.asked: list[tuple[int, int, int, int]] = []
        self._answers = list(answers)

    def cuMemAdvise(self, address: Any, size: Any, advice: int, place: int) -> int:
        self.asked.append((address.value, size.value, advice, place))
        return self._answers.pop(0)


def test_the_driver_is_asked_to_leave_it_on_the_host_within_the_devices_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(0, 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == "libcuda.so.1" else None)
    memory = PinnedMemory(64)
    where = (memory.view.ctypes.data, 256)
    assert driver.asked == [(*where, 3, -1), (*where, 5, 0)]
    assert memory.stays


@pytest.mark.parametrize("answers", [(801, 0), (0, 801)])
def test_a_driver_that_refuses_leaves_memory_like_any_other(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[int, int]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(*answers))
    memory = PinnedMemory(64)
    assert memory.shared
    assert not memory.stays


def test_without_a_driver_it_is_memory_like_any_other() -> None:
    assert not PinnedMemory(64).stays
