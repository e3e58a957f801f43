"""Layers of the encoder backend: attention of each token to all of its prompt, or to those near it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...mlxlm import Window


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens `first` to `first + count` of a batch: the whole prompt of one sequence."""

    first: int
    count: int


@dataclass
class EncoderPass:
    """A step's data that all layers share: the prompts, and the tokens' positions (T,)."""

    prompts: Sequence[Placed] = ()
    positions: Any = None


class EncoderLayer:
    """One layer. With a `window` a token sees those whose distance is smaller; 0: all."""

    def __init__(self, window: int, step: EncoderPass) -> None:
        self._window = window
        self._step = step

    @property
    def offset(self) -> Any:
        """Positions (T,) of the batch's tokens."""
        return self._step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask, as `attend` knows it."""
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values

    def attend(self, queries: Any, keys: Any, values: Any, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (T, query heads, 1, D) of `queries` of that shape, each token over its own prompt, before and
        behind it."""
        parts = []
        for one in self._step.prompts:
            own = (_part_of(array, one) for array in (queries, keys, values))
            mask = near(one.count, self._window)
            out = mx.fast.scaled_dot_product_attention(*own, scale=scale, mask=mask, sinks=sinks)
            parts.append(out[0].transpose(1, 0, 2)[:, :, None])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def near(count: int, window: int) -> Any | None:
    """Mask (count, count) of tokens less than `window` apart; None where all are, or without a window."""
    if not 0 < window < count:
        return None
    places = mx.arange(count)
    return mx.abs(places[:, None] - places[None]) < window


def _part_of(array: Any, one: Placed) -> Any:
    """A prompt's part (1, heads, n, D) of `array` (T, heads, 1, D)."""
    return array[one.first : one.first + one.count, :, 0].transpose(1, 0, 2)[None]
