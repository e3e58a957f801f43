"""A random step for recurrent layers: segments of several sequences, in slots of a pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests.runner.recurrent.references import Wide, wide
from treadle.runner.recurrent.step import FRESH, PADDING, RecurrentPass, SlotSegment, tables

SLOTS = 16


def segments(
    *counts: int, fresh: Sequence[int] = (), padding: int = 0, splits: Mapping[int, int] | None = None
) -> list[SlotSegment]:
    """Segments of `counts` tokens, with slots of their own; those at `fresh` begin their sequences. The states after
    `splits` tokens of some are kept, too."""
    made, first, asides = [], 0, itertools.count(len(counts))
    for i, count in enumerate(counts):
        split = (splits or {}).get(i, 0)
        own = (FRESH if i in fresh else i), SLOTS - 1 - i
        made.append(SlotSegment(first, count, *own, split, next(asides) if split else FRESH))
        first += count
    if padding:
        made.append(SlotSegment(first, padding, PADDING, FRESH))
    return made


def begun(own: Sequence[SlotSegment], empty: int = 0) -> RecurrentPass:
    """A step of `own` segments, with `empty` ones of no token behind them."""
    step = RecurrentPass()
    table, rows = tables(own)
    step.begin(own, mx.array(np.pad(table, ((0, empty), (0, 0)))), mx.array(rows))
    return step


def random(numbers: np.random.Generator, *shape: int, dtype: Any = mx.float32, scale: float = 1.0) -> Any:
    return mx.array(numbers.normal(0, scale, shape).astype(np.float32)).astype(dtype)


def compare(
    own: Sequence[SlotSegment],
    before: Any,
    after: Any,
    out: Any,
    reference: Callable[[slice, Wide], tuple[Wide, Wide]],
    tolerance: float,
) -> None:
    """Compare outputs (T, 1, ...) and the pool `after` the step with the reference of each segment alone."""
    expected = wide(before)
    for one in own:
        place = slice(one.first, one.first + one.count)
        found = wide(out[place])[:, 0]
        if one.source == PADDING:
            assert not found.any()
            continue
        state = expected[one.source] if one.source >= 0 else np.zeros_like(expected[0])
        y, expected[one.target] = reference(place, state)
        if one.split:
            _, expected[one.aside] = reference(slice(one.first, one.first + one.split), state)
        np.testing.assert_allclose(found, y, atol=tolerance * max(1, np.abs(y).max()), rtol=tolerance)
    np.testing.assert_allclose(wide(after), expected, atol=tolerance * max(1, np.abs(expected).max()), rtol=tolerance)
