"""A step's numbers go to the device together, and stay what they were though the host's memory is used again."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle.runner.device import staging
from treadle.runner.device.staging import Put, Staging, direct


@pytest.mark.parametrize("put", [Staging().put, direct], ids=["uploads", "plain"])
def test_each_array_arrives_as_it_was(put: Put) -> None:
    arrays: list[Any] = [
        np.arange(n, dtype=np.int32).reshape(shape) for n, shape in ((5, (5,)), (0, (0,)), (24, (3, 8)))
    ]
    arrays.append(np.array([2**31 - 1, -1, -(2**31)], np.int32))
    arrays.append(np.array([[1.5, -0.0], [np.inf, -3e-38]], np.float32))
    found = put(*arrays)
    for array, one in zip(arrays, found, strict=True):
        assert one.dtype == (mx.int32 if array.dtype == np.int32 else mx.float32)
        assert one.shape == array.shape
        assert one.tolist() == array.tolist()


SOME = 100


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that a few arrays fill."""
    monkeypatch.setattr(staging, "RING", 1 << 13)


@pytest.mark.usefixtures("small")
def test_what_arrived_stays_as_it_was_while_more_is_put() -> None:
    """Of the same size, and of others in between, some too large for the ring."""
    some, kept = Staging(), []
    for n in range(1, SOME):
        kept.append(some.put(np.full(n, n, np.int32))[0])
        some.put(np.full(1500 if n % 3 else 5000, n, np.int32))
        if n % 4 == 0:
            mx.eval(kept)
    assert [one.tolist() for one in kept] == [[n] * n for n in range(1, SOME)]


@pytest.mark.usefixtures("small")
def test_any_number_may_be_on_their_way_at_once() -> None:
    """As many rows as a step has may want the log-probabilities of their prompts."""
    some = Staging()
    kept = [some.put(np.full(n, n, np.int32))[0] for n in range(1, SOME)]
    assert [one.tolist() for one in kept] == [[n] * n for n in range(1, SOME)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("size", [2048, 2049, 8192, 20000])
def test_large_arrays_arrive_too(size: int) -> None:
    some = Staging()
    kept = [some.put(np.arange(size, dtype=np.int32) + n)[0] for n in range(7)]
    assert all((np.array(one) == np.arange(size) + n).all() for n, one in enumerate(kept))


def test_arrays_whose_memory_can_not_be_written_are_made_anew() -> None:
    some = Staging()
    some._memory.shared = False
    kept = [some.put(np.full(n, n, np.int32))[0] for n in range(1, SOME)]
    assert [one.tolist() for one in kept] == [[n] * n for n in range(1, SOME)]
    assert not some._copies
