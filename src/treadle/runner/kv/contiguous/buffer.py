"""The keys and values of one row in one layer, side by side in buffers that grow."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

STEP = 256
"""Tokens by which a buffer grows."""


class Buffer:
    """Tokens `base` to `end` of a row: `keys` and `values` (1, kv heads, capacity, D), evaluated or about to be.

    With a `window`, what no later token can see is let go, except for `slack` tokens more.
    """

    __slots__ = ("base", "end", "keys", "nbytes", "slack", "values", "window")

    def __init__(self, window: int, slack: int) -> None:
        self.window = window
        self.slack = slack
        self.base = 0
        self.end = 0
        self.keys: Any = None
        self.values: Any = None
        self.nbytes = 0

    def append(self, keys: Any, values: Any) -> None:
        """Put `keys` and `values` (1, kv heads, n, D) behind what is there."""
        count = keys.shape[2]
        if self.keys is None or self.end - self.base + count > self.keys.shape[2]:
            self._make_room(count, keys, values)
        at = self.end - self.base
        self.keys[..., at : at + count, :] = keys
        self.values[..., at : at + count, :] = values
        self.end += count

    def begin_with(self, keys: list[Any], values: list[Any], base: int) -> None:
        """Hold copies of `keys` and `values`, one behind the other, as tokens from `base` on."""
        count = sum(part.shape[2] for part in keys)
        more = self._capacity(count + 1) - count
        self.keys = mx.concatenate([*keys, _room(keys[0], more)], axis=2)
        self.values = mx.concatenate([*values, _room(values[0], more)], axis=2)
        self.base, self.end = base, base + count
        self.nbytes = int(self.keys.nbytes + self.values.nbytes)

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        assert self.base <= end <= self.end
        self.end = end

    def last(self, count: int) -> tuple[Any, Any]:
        """Keys and values of the last `count` tokens."""
        return self.between(self.end - count, self.end)

    def between(self, start: int, end: int) -> tuple[Any, Any]:
        """Keys and values of tokens `start` to `end`, which must be there."""
        assert self.base <= start <= end <= self.end
        a, b = start - self.base, end - self.base
        if a == 0 and b == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., a:b, :], self.values[..., a:b, :]

    def _first_kept(self) -> int:
        """The first token that has to stay when room is made."""
        return max(self.base, self.end - (self.window - 1 + self.slack)) if self.window else self.base

    def _make_room(self, count: int, keys: Any, values: Any) -> None:
        start = self._first_kept()
        kept = self.end - start
        more = self._capacity(kept + count) - kept
        self.keys = self._grown(self.keys, start, _room(keys, more))
        self.values = self._grown(self.values, start, _room(values, more))
        self.nbytes = int(self.keys.nbytes + self.values.nbytes)
        self.base = start

    def _capacity(self, count: int) -> int:
        return -(-count // STEP) * STEP

    def _grown(self, old: Any, start: int, room: Any) -> Any:
        if start == self.end:
            return room
        return mx.concatenate([old[..., start - self.base : self.end - self.base, :], room], axis=2)


def _room(like: Any, count: int) -> Any:
    return mx.zeros((1, like.shape[1], count, like.shape[3]), like.dtype)
