"""Recurrent layers by MLX's operations: odd batches, types, and what the kernels' tests have for the kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.recurrent import references
from tests.runner.recurrent.passes import SLOTS, begun, compare, random, segments
from tests.runner.recurrent.references import wide
from treadle.runner.recurrent.operations import RecurrentOperations
from treadle.runner.recurrent.slot_arrays import SlotArrays
from treadle.runner.recurrent.step import Norm, RecurrentPass, SlotSegment, tables

OWN = segments(1, 19, 1, 1, 40, 8, 1, fresh=(1, 2), splits={1: 5, 5: 1})
TOKENS = 71


def rows(array: Any, place: slice) -> Any:
    return wide(array[place])[:, 0]


def filled(before: Any) -> SlotArrays:
    slots = RecurrentOperations().new_pool(SLOTS, before.shape[1:], before.dtype)
    slots.write(range(SLOTS), before)
    return slots


def after(slots: SlotArrays) -> Any:
    return slots.read(range(SLOTS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-5), (mx.bfloat16, 0.02)])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_gated_delta_rule(dtype: Any, tolerance: float, bound: float | None) -> None:
    numbers, operations = np.random.default_rng(0), RecurrentOperations()
    q, k = (random(numbers, TOKENS, 1, 2, 32, dtype=dtype) for _ in range(2))
    v, a = random(numbers, TOKENS, 1, 4, 16, dtype=dtype), random(numbers, TOKENS, 1, 4, dtype=dtype)
    b, a_log, bias = random(numbers, TOKENS, 1, 4, dtype=dtype), random(numbers, 4), random(numbers, 4)
    before = random(numbers, SLOTS, 4, 16, 32)
    slots = filled(before)
    out = operations.gated_delta(
        *(q, k, v, a, b, a_log, bias, slots, begun(OWN)), lower_bound=bound, norm=Norm(32**-0.5, 1e-6)
    )
    assert out.dtype == dtype
    logs, beta = references.delta_gates(wide(a), wide(b), wide(a_log), wide(bias), bound, 1.0)
    wide_q, wide_k = (wide(x) / np.sqrt((wide(x) ** 2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))

    def reference(at: slice, state: Any) -> Any:
        return references.delta(
            wide_q[at][:, 0] * 32**-0.5, wide_k[at][:, 0], rows(v, at), logs[at][:, 0], beta[at][:, 0], state
        )

    compare(OWN, before, after(slots), out, reference, tolerance)


def test_states_are_kept_in_their_type() -> None:
    numbers, operations = np.random.default_rng(0), RecurrentOperations()
    x, dt = random(numbers, TOKENS, 1, 24, dtype=mx.bfloat16), mx.abs(random(numbers, TOKENS, 1, 24, dtype=mx.bfloat16))
    b, c = (random(numbers, TOKENS, 1, 8, dtype=mx.bfloat16) for _ in range(2))
    a_log, before = random(numbers, 24, 8), random(numbers, SLOTS, 24, 8, dtype=mx.bfloat16)
    slots = filled(before)
    out = operations.channels(x, dt, a_log, b, c, slots, begun(OWN))
    assert out.dtype == after(slots).dtype == mx.bfloat16

    def reference(at: slice, state: Any) -> Any:
        return references.channels(rows(x, at), rows(dt, at), wide(a_log), rows(b, at), rows(c, at), state)

    compare(OWN, before, after(slots), out, reference, 0.03)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions(width: int, bias: bool) -> None:
    numbers, operations = np.random.default_rng(width), RecurrentOperations()
    x, weight = random(numbers, TOKENS, 1, 24), random(numbers, 24, width, 1)
    more, before = random(numbers, 24) if bias else None, random(numbers, SLOTS, width - 1, 24)
    slots = filled(before)
    out = operations.convolve(x, weight, more, slots, begun(OWN))
    compare(
        OWN,
        before,
        after(slots),
        out,
        lambda at, state: references.convolution(
            rows(x, at), wide(weight)[:, :, 0], None if more is None else wide(more), state
        ),
        1e-5,
    )


def test_segments_without_tokens_are_not_computed() -> None:
    step = RecurrentPass()
    own = [SlotSegment(0, 1, 0, 1), SlotSegment(1, 0), SlotSegment(1, 1, 2, 3), SlotSegment(2, 3, 4, 5)]
    step.begin(own, *map(mx.array, tables(own)))
    assert [(run.first, run.count, run.singles) for run in step.runs] == [(0, 2, True), (2, 3, False)]


def test_a_state_that_adds_nothing_is_made_once_for_a_number_of_tokens() -> None:
    step = begun(OWN)
    made = step.empty(8, mx.float32)
    assert made.shape == (TOKENS, 0, 8)
    assert step.empty(8, mx.float32) is made
    own = segments(2)
    step.begin(own, *map(mx.array, tables(own)))
    assert step.empty(8, mx.float32).shape == (2, 0, 8)
