"""A step's numbers go to the device together, and stay what they were though the host's memory is used again."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle.runner import uploads
from treadle.runner.uploads import RING, Put, Uploads, plain


@pytest.mark.parametrize("put", [Uploads().put, plain], ids=["uploads", "plain"])
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


def test_what_arrived_stays_as_it_was_while_more_is_put() -> None:
    """Of the same size, and of others in between; up to RING may be on their way at once."""
    some, kept = Uploads(), []
    for n in range(1, 3 * RING):
        kept.append(some.put(np.full(n, n, np.int32))[0])
        some.put(np.full(5000, n, np.int32))
        if n % RING == 0:
            mx.eval(kept)
    assert [one.tolist() for one in kept] == [[n] * n for n in range(1, 3 * RING)]


def test_any_number_may_be_on_their_way_at_once() -> None:
    """As many rows as a step has may want the log-probabilities of their prompts."""
    some = Uploads()
    kept = [some.put(np.full(n, n, np.int32))[0] for n in range(1, 3 * RING)]
    assert [one.tolist() for one in kept] == [[n] * n for n in range(1, 3 * RING)]


def test_arrays_whose_memory_can_not_be_written_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_is_shared", lambda host: False)
    some = Uploads()
    kept = [some.put(np.full(n, n, np.int32))[0] for n in range(1, 3 * RING)]
    assert [one.tolist() for one in kept] == [[n] * n for n in range(1, 3 * RING)]
    assert not some._rings


def test_memory_that_only_a_copy_of_can_be_written_is_not_shared() -> None:
    class Copied:
        def __array__(self, dtype: object = None, copy: bool | None = None) -> object:
            if copy is False:
                raise ValueError("a copy is needed")
            return np.zeros(2, np.uint32)

        def __getitem__(self, at: int) -> object:
            return np.uint32(0)

    assert not uploads._is_shared(Copied())
    assert uploads._is_shared(mx.array(np.zeros(2, np.uint32)))


def test_the_hosts_memory_is_taken_once() -> None:
    """What MLX frees it gives to others, who would then live on the host."""
    some, places = Uploads(), set()
    for n in range(3 * RING):
        mx.eval(some.put(np.full(n % 100 + 1, n, np.int32)))
        places |= {place.view.ctypes.data for ring in some._rings.values() for place in ring}
    assert len(places) == RING
