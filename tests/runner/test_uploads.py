"""A step's numbers go to the device together, and their places there do not depend on how many they are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from treadle.runner import uploads
from treadle.runner.uploads import Uploads


def test_each_array_arrives_as_it_was() -> None:
    arrays = [np.arange(n, dtype=np.int32).reshape(shape) for n, shape in ((5, (5,)), (0, (0,)), (24, (3, 8)))]
    arrays.append(np.array([2**31 - 1], np.int32))
    found = Uploads().put(*arrays)
    for array, one in zip(arrays, found, strict=True):
        assert one.dtype == mx.int32
        assert one.shape == array.shape
        assert one.tolist() == array.tolist()


def test_what_was_put_stays_as_it_was_while_more_is_put() -> None:
    """Though the host's copies take each other's place."""
    some = Uploads()
    first = [some.put(np.full(n, n, np.int32))[0] for n in range(1, 40)]
    assert [one.tolist() for one in first] == [[n] * n for n in range(1, 40)]


def test_the_last_few_copies_of_the_host_are_kept() -> None:
    some = Uploads()
    for n in range(20):
        some.put(np.array([n], np.int32))
        assert len(some._kept) == min(n + 1, uploads._KEPT)
