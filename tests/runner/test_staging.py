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


def numbers(*sizes: int, first: int = 0) -> list[Any]:
    return [np.arange(first, first + size, dtype=np.int32) for size in sizes]


def noted(some: Staging) -> dict[int, Any]:
    """Put two groups of arrays; return what is reserved for them, which is to be lazy still."""
    some.note(True)
    some.put(*numbers(11))
    some.note(True)
    groups = [some.put(*numbers(5, 8)), some.put(np.ones((3, 2), np.float32))]
    mx.eval(groups)
    later = some.reserve()
    assert later.keys() == {id(array) for group in groups for array in group}
    return later


def test_reserved_arrays_get_the_numbers_that_are_put_later() -> None:
    """Also those that graphs were built on before."""
    some = Staging()
    later = list(noted(some).values())
    doubled = [2 * one for one in later]
    put = [*some.put(*numbers(5, 8, first=100)), *some.put(np.full((3, 2), 0.5, np.float32))]
    assert all(mine is other for mine, other in zip(put, later, strict=True))
    assert doubled[0].tolist() == [2 * n for n in range(100, 105)]
    assert doubled[1].tolist() == [2 * n for n in range(100, 108)]
    assert doubled[2].tolist() == [[1.0, 1.0]] * 3
    assert some.put(*numbers(5, 8))[0].tolist() == list(range(5)), "each is given out once"


@pytest.mark.parametrize("others", [numbers(5), numbers(5, 9), [np.ones((5, 1), np.int32)], [np.ones(5, np.float32)]])
def test_reserved_arrays_are_dropped_where_others_are_put(others: list[Any]) -> None:
    some = Staging()
    later = noted(some).values()
    found = [*some.put(*others), *some.put(*numbers(5, 8))]
    assert not any(one is other for one in found for other in later)
    assert [np.array(one).tolist() for one in found[: len(others)]] == [one.tolist() for one in others]


def test_what_was_put_in_the_reserve_stays_while_it_is_used_again() -> None:
    """Evaluated or not, reservation after reservation."""
    some, kept = Staging(), []
    for n in range(1, SOME):
        some.note(True)
        kept.append(some.put(np.full(7, n, np.int32))[0])
        if n % 3 == 0:
            mx.eval(kept)
        assert len(some.reserve()) == 1
    assert [one.tolist() for one in kept] == [[n] * 7 for n in range(1, SOME)]


def test_nothing_is_reserved_for_what_was_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where there is no room, or the device does not see what is written later."""
    some = Staging()
    some.put(*numbers(5))
    assert some.reserve() == {}
    some.note(True)
    (noted,) = some.put(*numbers(5))
    some.note(False)
    some.put(*numbers(6))
    assert some.reserve().keys() == some.reserve().keys() == {id(noted)}, "as often as it is asked for"
    monkeypatch.setattr(staging, "RESERVE", 1 << 11)
    for sizes, room in (((5,), True), ((5, 2000), True), ((5, 2049), False)):
        some.note(True)
        some.put(*numbers(*sizes))
        assert bool(some.reserve()) is room
    some._reserve.shared = False
    some.note(True)
    some.put(*numbers(5))
    assert some.reserve() == {}
