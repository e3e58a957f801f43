"""Rows whose tokens have positions of their own, or see tokens behind them, and what a model gives for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from treadle.runner.loading.model import LoadedModel

Numbers = npt.NDArray[np.int32]


def sparse(dice: Any, count: int, start: int = 0, longest: int = 9) -> Numbers:
    """Increasing positions of `count` tokens from `start` on, with gaps of up to `longest`."""
    gaps = [dice.choice([1, 1, 1, dice.randint(1, longest)]) for _ in range(count)]
    return np.array(start - 1 + np.cumsum(gaps), np.int32)


def blocks(dice: Any, start: int, count: int) -> Numbers:
    """The last index that each of `count` tokens from index `start` on sees: some are in blocks that see all of
    themselves."""
    last = np.arange(start, start + count, dtype=np.int32)
    at = 0
    while at < count:
        size = min(dice.choice([1, 1, 2, 7, 30]), count - at)
        if dice.random() < 0.5:
            last[at : at + size] = start + at + size - 1
        at += size
    return last


def sees(positions: Numbers, last: Numbers, window: int, chunk: int = 0) -> npt.NDArray[np.bool_]:
    """Which tokens each one sees (n, n): up to the index `last` (n,), and of the `positions` (n,) that its window has,
    or its chunk."""
    mask = np.arange(len(positions)) <= last[:, None]
    if window:
        mask &= positions > positions[:, None] - window
    if chunk:
        mask &= positions >= positions[:, None] // chunk * chunk
    return mask


@dataclass
class HandMade:
    """A cache of mlx-lm's protocol for one sequence whose tokens come all at once, as batches of one token: `positions`
    are their offsets, and masks are made of what they see."""

    positions: Numbers
    last: Numbers
    window: int = 0
    chunk: int = 0
    state: list[Any] = field(default_factory=list)

    @property
    def offset(self) -> Any:
        return mx.array(self.positions)

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Any:
        mask = sees(self.positions, self.last, window_size or self.window, self.chunk)
        return mx.array(mask)[:, None, None]

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        count = len(self.positions)
        of_all = [one[:, :, 0].swapaxes(0, 1)[None] for one in (keys, values)]
        keys, values = (mx.broadcast_to(one, (count, *one.shape[1:])) for one in of_all)
        return keys, values


def logits_of(model: LoadedModel, tokens: Sequence[int], positions: Numbers, last: Numbers | None = None) -> Any:
    """Logits (n, V) of all tokens of one sequence, by mlx-lm's own module with masks and positions written by hand."""
    last = np.arange(len(tokens), dtype=np.int32) if last is None else last
    windows = model.library.windows(model.module) or []
    own = model.library.new_caches(model.module)
    chunked = [type(one).__name__ == "ChunkedKVCache" for one in own]
    caches = [
        HandMade(positions, last, 0 if chunk else window, window if chunk else 0)
        for window, chunk in zip(windows, chunked, strict=True)
    ]
    found = model.module(mx.array([tokens]).T, cache=caches)[:, 0]
    mx.eval(found)
    return np.array(found.astype(mx.float32))


def places(done: Any) -> Mapping[str, Any]:
    """The logits of each sequence of a pass."""
    logits = np.array(done.logits.astype(mx.float32))
    return {id_: logits[first : first + count] for id_, (first, count) in done.places.items()}
