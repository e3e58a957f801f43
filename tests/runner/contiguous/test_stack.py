"""Sequences that decode together, stacked in one array: what they attend to, and how they join and leave."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from tests.runner.contiguous.test_buffer import add, positions
from tests.runner.contiguous.test_layer import Rows
from treadle.runner.kv.contiguous.buffer import STEP, Buffer
from treadle.runner.kv.contiguous.stack import _SETTLED, Stack, Stacks


def filled(*lengths: int, window: int = 0) -> list[Buffer]:
    made = [Buffer(window, 32) for _ in lengths]
    for one, length in zip(made, lengths, strict=True):
        add(one, length)
    return made


def append(stack: Stack, buffers: list[Buffer]) -> None:
    keys = mx.concatenate([mx.full((1, 2, 1, 3), one.end, mx.float32) for one in buffers])
    stack.append(keys, -keys)
    mx.eval(stack.keys, stack.values)


def stacked(rows: Rows) -> bool:
    return any(one is not None for one in rows.rows.backend._stacks._made)


@pytest.mark.parametrize("with_sinks", [True, False], ids=["sinks", "none"])
@pytest.mark.parametrize("window", [0, 5, 300])
def test_stacked_rows_attend_to_their_own_tokens(window: int, with_sinks: bool) -> None:
    """Of several lengths, over arrays that grow, and again after one has left, come back or had several tokens."""
    dice = random.Random(window)
    rows = Rows(dice, window, "cpu")
    sinks = rows.fresh(1, 1, rows.heads * rows.group)[0, 0] if with_sinks else None
    rows.step({"a": 250, "b": 200, "c": 130}, sinks)
    for others in ({}, {"d": 70}, {"b": 3}, {}):
        for _ in range(_SETTLED + 8):
            rows.step(dict.fromkeys("abc", 1), sinks)
        assert stacked(rows)
        if others:
            rows.step({**dict.fromkeys("abc", 1), **others}, sinks)
    rows.step({"d": 2}, sinks)
    assert stacked(rows), "as none of them has had another token"
    rows.rows.release("c")
    assert not stacked(rows)
    for _ in range(_SETTLED + 1):
        rows.step(dict.fromkeys("ba", 1), sinks)
    assert stacked(rows)
    rows.step(dict.fromkeys("ab", 1), sinks)
    assert not stacked(rows), "they are in another order"


@pytest.mark.parametrize("window", [0, 40])
def test_rows_of_a_stack_hold_what_they_held(window: int) -> None:
    made = filled(300, 170, 260, window=window)
    stack = Stack(made)
    held = [min(one.end, window + 31) if window else one.end for one in made]
    for one, count in zip(made, held, strict=True):
        assert positions(one, count) == list(range(one.end - count, one.end))
    for _ in range(STEP):
        append(stack, made)
    held = [min(one.end, window + 31) if window else one.end for one in made]
    for one, count in zip(made, held, strict=True):
        assert positions(one, count) == list(range(one.end - count, one.end))
    assert sum(one.nbytes for one in made) == stack.keys.nbytes + stack.values.nbytes


def test_a_row_that_leaves_goes_on_by_itself() -> None:
    first, second = made = filled(300, 200)
    stack = Stack(made)
    append(stack, made)
    first.cut(301)
    assert not stack.broken, "it had no more"
    first.cut(280)
    assert stack.broken
    add(first, 30)
    add(second, 400)
    assert positions(first, 310) == list(range(310))
    assert positions(second, 601) == list(range(601))
    assert [one.stack for one in made] == [None, None]


def follow(lengths: list[int], stacks: Stacks | None = None, dim: int = 3) -> tuple[list[list[Buffer]], Stacks]:
    rows = [[Buffer(0, 32)] for _ in lengths]
    for (one,), length in zip(rows, lengths, strict=True):
        part = mx.zeros((1, 2, length, dim))
        if length:
            one.append(part, part)
    stacks = stacks or Stacks([True])
    for _ in range(2 * _SETTLED):
        made = stacks.follow(rows)
    assert len(made) <= 1
    return rows, stacks


@pytest.mark.parametrize("lengths", [[100], [1000, 10, 10], [100, 0]], ids=["one", "unlike", "empty"])
def test_rows_that_gain_nothing_are_not_stacked(lengths: list[int]) -> None:
    rows, _ = follow(lengths)
    assert all(one.stack is None for (one,) in rows)


def test_large_rows_are_not_stacked() -> None:
    rows, _ = follow([700, 700], dim=16)
    assert all(one.stack is not None for (one,) in rows)
    rows, _ = follow([700, 700], dim=256)
    assert all(one.stack is None for (one,) in rows)


def test_layers_that_cannot_are_not_stacked() -> None:
    rows, _ = follow([100, 100], Stacks([False]))
    assert all(one.stack is None for (one,) in rows)


def test_nothing_is_kept_of_a_row_that_is_released() -> None:
    rows, stacks = follow([100, 100])
    stacks.release([Buffer(0, 32)])
    assert rows[0][0].stack is not None
    stacks.release(rows[0])
    assert all(one.stack is None for (one,) in rows)
    assert not stacks._rows
