"""Memory that kernels use in turn."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from treadle.runner.fused.workspace import Workspace


def test_every_shape_is_the_beginning_of_the_same_memory() -> None:
    some = Workspace(mx.float16)
    some.reserve(12)
    some.reserve(5)
    places = {np.array(some.array(*shape), copy=False).ctypes.data for shape in ((12,), (3, 4), (2, 1, 2), (1,))}
    assert len(places) == 1
    assert some.array(3, 4).dtype == mx.float16


def test_what_was_not_reserved_is_not_there() -> None:
    some = Workspace(mx.float32)
    some.reserve(4)
    with pytest.raises(AssertionError):
        some.array(5)
    some.array(4)
    some.reserve(3)


def test_memory_is_taken_anew_where_more_is_reserved() -> None:
    some = Workspace(mx.float32)
    some.reserve(4)
    before = some.array(4)
    some.reserve(5)
    assert some.array(5).shape == (5,)
    assert some.array(4) is not before
