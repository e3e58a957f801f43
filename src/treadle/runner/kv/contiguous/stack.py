"""Buffers of several sequences in one array: where they are small, attention over all at once has fewer operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .buffer import Buffer, capacity

_SETTLED = 4
"""Passes of the same sequences after which they are stacked: each is copied when it joins, and when it leaves."""
_MOST_BYTES = 2 << 20
"""The largest stack that is made. Attention over more takes longer than its operations take to start."""


class Stack:
    """The buffers of some sequences in one layer: arrays (B, kv heads, capacity, D) with their last tokens in the same
    column. A sequence leaves when anything but the next token of all is written, or forgotten."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        lengths = [one.end - one.base for one in buffers]
        self.width = max(lengths)
        self.broken = False
        self._starts = [self.width - length for length in lengths]
        self._buffers = buffers
        self.keys = self._aligned([one.keys for one in buffers], lengths)
        self.values = self._aligned([one.values for one in buffers], lengths)
        for row, one in enumerate(buffers):
            one.join(self, row)

    def _aligned(self, arrays: Sequence[Any], lengths: Sequence[int]) -> Any:
        """The last dimension but one of `arrays` up to `lengths`, which all end in the same column."""
        last = capacity(self.width + 1) - self.width
        rows = [
            mx.pad(array[..., :length, :], [(0, 0), (0, 0), (start, last), (0, 0)])
            for array, length, start in zip(arrays, lengths, self._starts, strict=True)
        ]
        return mx.concatenate(rows)

    def append(self, keys: Any, values: Any) -> None:
        """Append a token of each sequence: `keys` and `values` (B, kv heads, 1, D)."""
        at = self.width
        if at == self.keys.shape[2]:
            at = self._grow()
        self.keys[..., at : at + 1, :] = keys
        self.values[..., at : at + 1, :] = values
        self.width = at + 1
        for one in self._buffers:
            one.end += 1

    def _grow(self) -> int:
        """Make space for more tokens, and drop those that no later one sees. Return the new width."""
        first = min(self._starts)
        if window := self._buffers[0].window:
            first = max(first, self.width - (window - 1 + self._buffers[0].slack))
        kept = self.width - first
        more = [(0, 0), (0, 0), (0, capacity(kept + 1) - kept), (0, 0)]
        self.keys = mx.pad(self.keys[..., first : self.width, :], more)
        self.values = mx.pad(self.values[..., first : self.width, :], more)
        for one, start in zip(self._buffers, self._starts, strict=True):
            one.base += max(0, first - start)
        self._starts = [max(0, start - first) for start in self._starts]
        for one in self._buffers:
            one.nbytes = self.row_bytes
        return kept

    @property
    def row_bytes(self) -> int:
        """Bytes of each sequence's part."""
        return int(self.keys.nbytes + self.values.nbytes) // len(self._buffers)

    def seen(self, window: int, masks: dict[Any, Any]) -> tuple[Any, Any, Any | None]:
        """Keys and values (B, kv heads, S, D) that the last tokens see, and a mask (B, 1, 1, S) to add to scores, which
        is kept in `masks`; None where all see the same."""
        low = max(0, self.width - window) if window else 0
        keys, values = self.keys[..., low : self.width, :], self.values[..., low : self.width, :]
        if max(self._starts) <= low:
            return keys, values, None
        shape = low, self.width, *self._starts
        if shape not in masks:
            seen = np.arange(low, self.width) >= np.array(self._starts)[:, None]
            masks[shape] = mx.array(np.where(seen, 0, -np.inf).astype(np.float32))[:, None, None]
        return keys, values, masks[shape].astype(keys.dtype)

    def part(self, row: int, start: int, end: int | None) -> tuple[Any, Any]:
        """Keys and values (1, kv heads, n, D) of those of a sequence's tokens that it holds; None: to the capacity."""
        first = self._starts[row]
        columns = slice(first + start, None if end is None else first + end)
        return self.keys[row : row + 1, :, columns], self.values[row : row + 1, :, columns]


class Stacks:
    """The stacks of those `layers` that can have one, for the sequences that are in pass after pass."""

    def __init__(self, layers: Sequence[bool]) -> None:
        self._layers = layers
        self._rows: Sequence[Sequence[Buffer]] = ()
        self._passes = 0
        self._made: list[Stack | None] = []

    def follow(self, rows: Sequence[Sequence[Buffer]]) -> Sequence[Stack | None]:
        """Return the stack of each layer for the buffers of a pass's sequences, or None; nothing before there are any.
        Their next tokens must be appended to all that are returned."""
        same = len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))
        if not same or any(one is not None and one.broken for one in self._made):
            self.dissolve()
            self._rows = rows
        self._passes += 1
        if self._passes == _SETTLED and len(rows) > 1:
            layers = zip(self._layers, zip(*rows, strict=True), strict=True)
            self._made = [Stack(buffers) if can and _gains(buffers) else None for can, buffers in layers]
        return self._made

    def release(self, buffers: Sequence[Buffer]) -> None:
        """Keep nothing of a sequence."""
        if any(one is buffers for one in self._rows):
            self.dissolve()

    def dissolve(self) -> None:
        """Give all sequences buffers of their own again."""
        for one in (buffer for row in self._rows if self._made for buffer in row):
            one.leave()
        self._rows, self._passes, self._made = (), 0, []


def _gains(buffers: Sequence[Buffer]) -> bool:
    """Whether a stack takes less time: it is small, and most of it is no padding."""
    if any(one.keys is None or one.end == one.base for one in buffers):
        return False
    lengths = [one.end - one.base for one in buffers]
    columns = max(lengths) * len(buffers)
    return columns <= 2 * sum(lengths) and columns * buffers[0].token_bytes <= _MOST_BYTES
