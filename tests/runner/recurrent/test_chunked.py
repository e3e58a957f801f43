"""Chunked forms of recurrences against NumPy in float64, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.recurrent import references
from tests.runner.recurrent.references import Wide, wide
from treadle.runner.recurrent import chunked

HEADS, GROUPS, KEYS, VALUES = 4, 2, 32, 24
LENGTHS = (1, 7, 16, 64, 130, 600)
Numbers = np.random.Generator


def strengths(numbers: Numbers, shape: tuple[int, ...], strength: float) -> Any:
    """Logarithms of decays; of a mixed strength, where it is 0, from none to those that forget everything."""
    most = strength or 10.0 ** numbers.uniform(-4, 4, shape)
    return mx.array((-most * numbers.exponential(size=shape)).astype(np.float32))


def array(numbers: Numbers, *shape: int) -> Any:
    return mx.array(numbers.normal(size=shape).astype(np.float32))


def unit(numbers: Numbers, count: int) -> Any:
    keys = array(numbers, count, GROUPS, KEYS)
    return keys / mx.linalg.norm(keys, axis=-1, keepdims=True)


def close(found: tuple[Any, Any], wanted: tuple[Wide, Wide], tolerance: float = 5e-5) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(wide(one), other, atol=tolerance * max(1e-3, np.abs(other).max()), rtol=tolerance)


@pytest.mark.parametrize("strength", [0.0, 0.001, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("vector", [False, True])
def test_the_gated_delta_rule(count: int, strength: float, vector: bool) -> None:
    numbers = np.random.default_rng(count)
    q, k, v = unit(numbers, count), unit(numbers, count), array(numbers, count, HEADS, VALUES)
    beta = mx.array(numbers.uniform(0, 2, (count, HEADS)).astype(np.float32))
    logs = strengths(numbers, (count, HEADS, *([KEYS] if vector else [])), strength)
    state = array(numbers, HEADS, VALUES, KEYS)
    close(chunked.delta(q, k, v, logs, beta, state), references.delta(*map(wide, (q, k, v, logs, beta, state))))


def test_keys_that_repeat_do_not_lose_precision() -> None:
    """The inverse of a chunk is exact where powers of its matrix would cancel each other."""
    numbers = np.random.default_rng(0)
    k = mx.broadcast_to(unit(numbers, 1), (200, GROUPS, KEYS))
    q, v, state = unit(numbers, 200), array(numbers, 200, HEADS, VALUES), array(numbers, HEADS, VALUES, KEYS)
    logs, beta = mx.zeros((200, HEADS)), mx.ones((200, HEADS))
    close(chunked.delta(q, k, v, logs, beta, state), references.delta(*map(wide, (q, k, v, logs, beta, state))))


@pytest.mark.parametrize("strength", [0.0, 0.001, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("count", LENGTHS)
def test_states_that_decay(count: int, strength: float) -> None:
    numbers = np.random.default_rng(count)
    q, k, v = unit(numbers, count), unit(numbers, count), array(numbers, count, HEADS, VALUES)
    logs, state = strengths(numbers, (count, HEADS), strength), array(numbers, HEADS, VALUES, KEYS)
    close(chunked.linear(q, k, v, logs, state), references.linear(*map(wide, (q, k, v, logs, state))))


@pytest.mark.parametrize("count", [1, 15, 16, 50])
@pytest.mark.parametrize("strength", [0.01, 1.0, 1e4])
def test_channels(count: int, strength: float) -> None:
    numbers = np.random.default_rng(count)
    x, b, c = array(numbers, count, 40), array(numbers, count, 8), array(numbers, count, 8)
    dt, a_log, state = -strengths(numbers, (count, 40), strength), array(numbers, 40, 8), array(numbers, 40, 8)
    found = chunked.channels(x, dt, -mx.exp(a_log), b, c, state)
    close(found, references.channels(*map(wide, (x, dt, a_log, b, c, state))))


def test_a_decay_of_nothing_at_all_is_no_nan() -> None:
    numbers = np.random.default_rng(0)
    run: Callable[..., Any] = chunked.linear
    q, k, v = unit(numbers, 40), unit(numbers, 40), array(numbers, 40, HEADS, VALUES)
    logs = mx.where(mx.arange(40)[:, None] % 5 == 3, -mx.inf, mx.full((40, HEADS), -0.1))
    state = array(numbers, HEADS, VALUES, KEYS)
    wanted = references.linear(*map(wide, (q, k, v, logs, state)))
    close(run(q, k, v, logs, state), wanted)
