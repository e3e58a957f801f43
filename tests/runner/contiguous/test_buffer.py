"""The keys and values of one row in one layer."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from treadle.runner.kv.contiguous.buffer import STEP, Buffer


def tokens(start: int, count: int) -> mx.array:
    """Keys that are their positions, for two heads of three numbers."""
    return mx.broadcast_to(mx.arange(start, start + count, dtype=mx.float32)[None, None, :, None], (1, 2, count, 3))


def add(buffer: Buffer, count: int) -> None:
    part = tokens(buffer.end, count)
    buffer.append(part, -part)
    mx.eval(buffer.keys, buffer.values)


def positions(buffer: Buffer, count: int) -> list[float]:
    keys, values = buffer.last(count)
    assert mx.array_equal(keys, -values).item()
    return list(keys[0, 1, :, 2].tolist())


@pytest.mark.parametrize("window", [0, 8, 300])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_seen_is_there_in_order(window: int, seed: int) -> None:
    """Without a window everything; with one, what the next token and a few before it see."""
    dice = random.Random(seed)
    buffer = Buffer(window, 32)
    while buffer.end < 1500:
        before = buffer.end
        add(buffer, dice.choice([1, 1, 3, 50, 256, 400]))
        seen = min(buffer.end, buffer.end - before + window - 1 + 32) if window else buffer.end
        assert positions(buffer, seen) == list(range(buffer.end - seen, buffer.end))


@pytest.mark.parametrize("window", [0, 8, 300])
def test_it_takes_what_it_holds_and_less_than_a_step_more(window: int) -> None:
    buffer = Buffer(window, 32)
    for _ in range(900):
        add(buffer, 1)
        held = min(buffer.end, window + 32) if window else buffer.end
        assert buffer.keys.shape[2] < held + 2 * STEP
        assert buffer.nbytes == buffer.keys.nbytes + buffer.values.nbytes


def test_the_end_can_be_written_again() -> None:
    buffer = Buffer(0, 32)
    add(buffer, 300)
    buffer.cut(250)
    assert positions(buffer, 250) == list(range(250))
    add(buffer, 20)
    assert positions(buffer, 270) == list(range(270))


def test_it_begins_with_copies_of_what_others_computed() -> None:
    buffer = Buffer(8, 32)
    parts = [tokens(64, 32), tokens(96, 7)]
    buffer.begin_with(parts, [-part for part in parts], 64)
    mx.eval(buffer.keys, buffer.values)
    assert (buffer.base, buffer.end) == (64, 103)
    add(buffer, 1)
    assert positions(buffer, 40) == list(range(64, 104))
    assert mx.array_equal(parts[0], tokens(64, 32)).item()
