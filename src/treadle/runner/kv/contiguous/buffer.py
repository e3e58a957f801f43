"""Growing buffers for the keys and values of one sequence in one layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

STEP = 256
"""Tokens by which a buffer grows."""


class Buffer:
    """Tokens `base` to `end` of a sequence: `keys` and `values` (1, kv heads, capacity, D), evaluated or about to be.

    With a `window`, tokens that no later one sees are dropped, except for the last `slack` of them.
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
        """Append `keys` and `values` (1, kv heads, n, D)."""
        count = keys.shape[2]
        if self.keys is None or self.end - self.base + count > self.keys.shape[2]:
            self._grow(count, keys, values)
        at = self.end - self.base
        self.keys[..., at : at + count, :] = keys
        self.values[..., at : at + count, :] = values
        self.end += count

    def begin_with(self, keys: list[Any], values: list[Any], base: int) -> None:
        """Start with copies of the parts `keys` and `values`, in order, as tokens from `base` on."""
        count = sum(part.shape[2] for part in keys)
        more = self._capacity(count + 1) - count
        self.keys = mx.concatenate([*keys, _zeros(keys[0], more)], axis=2)
        self.values = mx.concatenate([*values, _zeros(values[0], more)], axis=2)
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
        """The first token that stays when the buffers grow."""
        return max(self.base, self.end - (self.window - 1 + self.slack)) if self.window else self.base

    def _grow(self, count: int, keys: Any, values: Any) -> None:
        start = self._first_kept()
        kept = self.end - start
        more = self._capacity(kept + count) - kept
        self.keys = self._grown(self.keys, start, _zeros(keys, more))
        self.values = self._grown(self.values, start, _zeros(values, more))
        self.nbytes = int(self.keys.nbytes + self.values.nbytes)
        self.base = start

    def _capacity(self, count: int) -> int:
        return -(-count // STEP) * STEP

    def _grown(self, old: Any, start: int, tail: Any) -> Any:
        if start == self.end:
            return tail
        return mx.concatenate([old[..., start - self.base : self.end - self.base, :], tail], axis=2)


def _zeros(like: Any, count: int) -> Any:
    return mx.zeros((1, like.shape[1], count, like.shape[3]), like.dtype)
