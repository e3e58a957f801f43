"""Slots of states in MLX arrays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from treadle.runner.recurrent.slot_arrays import SlotArrays
from treadle.runner.recurrent.step import FRESH


def states(*values: int) -> Any:
    return mx.array(values, mx.float32)[:, None]


@pytest.fixture
def slots() -> SlotArrays:
    made = SlotArrays(6, (1,), mx.float32)
    made.write([3, FRESH, 1, 0], states(30, 99, 10, 0))
    return made


def test_a_slot_is_read_as_it_was_written(slots: SlotArrays) -> None:
    assert slots.read([1, FRESH, 3, 0, 5]).tolist() == [[10], [0], [30], [0], [0]]


def test_rows_that_go_on_together_are_read_without_a_copy(slots: SlotArrays) -> None:
    kept = states(1, 2, 3)
    slots.write([0, 1, 2], kept)
    assert slots.read([0, 1, 2]) is kept
    assert slots.read([1, 2]).tolist() == [[2], [3]]
    assert slots.read([2, 0, 1]).tolist() == [[3], [1], [2]]


def test_a_step_is_computed_again_from_the_same_slots(slots: SlotArrays) -> None:
    before = slots.read([3]).tolist()
    slots.write([4], states(7))
    assert slots.read([3]).tolist() == before
    slots.write([4], states(8))
    assert slots.read([4]).tolist() == [[8]]


def test_a_detached_slot_keeps_no_row_of_others(slots: SlotArrays) -> None:
    slots.detach(1)
    slots.detach(5)  # of nothing
    assert slots.read([1]).tolist() == [[10]]
    assert slots.read([1]).shape == (1, 1)
    assert sorted(array.shape[0] for array in slots.arrays()) == [1, 4]
    own = slots.read([1])
    slots.detach(1)
    assert slots.read([1]) is own


def test_a_cleared_slot_keeps_no_array(slots: SlotArrays) -> None:
    for slot in range(6):
        slots.clear(slot)
    assert slots.arrays() == []
    assert slots.read([0]).tolist() == [[0]]
