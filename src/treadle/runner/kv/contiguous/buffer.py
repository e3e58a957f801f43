"""Growing buffers for the keys and values of one sequence in one layer."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

STEP = 256
"""Tokens by which a buffer grows."""


class SharedArrays(Protocol):
    """Arrays of several buffers (`stack.Stack`), each of which has a row."""

    keys: Any
    values: Any
    broken: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of each row."""
        ...

    def part(self, row: int, start: int, end: int | None) -> tuple[Any, Any]:
        """Keys and values (1, kv heads, n, D) of those of a row's tokens that are held; None: to the capacity."""
        ...


class Buffer:
    """Tokens `base` to `end` of a sequence: `keys` and `values` (1, kv heads, capacity, D), evaluated or about to be.

    With a `window`, tokens that no later one sees are dropped, except for the last `slack` of them. In a `stack` with
    other sequences it has no arrays of its own, until it leaves that.
    """

    __slots__ = ("base", "end", "keys", "nbytes", "row", "slack", "stack", "values", "window")

    def __init__(self, window: int, slack: int) -> None:
        self.window = window
        self.slack = slack
        self.base = 0
        self.end = 0
        self.keys: Any = None
        self.values: Any = None
        self.nbytes = 0
        self.stack: SharedArrays | None = None
        self.row = 0

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The arrays that hold its keys and values, its own or those of its stack."""
        return (self.keys, self.values) if self.stack is None else (self.stack.keys, self.stack.values)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.nbytes // int(self.arrays[0].shape[2])

    def join(self, stack: SharedArrays, row: int) -> None:
        """Become the `row` of a stack, which has its tokens."""
        self.stack, self.row = stack, row
        self.keys = self.values = None
        self.nbytes = stack.row_bytes

    def leave(self) -> None:
        """Leave the stack, if it is in one, which is broken then."""
        if self.stack is not None:
            self.stack.broken = True
            self.keys, self.values = self.stack.part(self.row, 0, None)
            self.nbytes = int(self.keys.nbytes + self.values.nbytes)
            self.stack = None

    def append(self, keys: Any, values: Any) -> None:
        """Append `keys` and `values` (1, kv heads, n, D)."""
        count = keys.shape[2]
        self.leave()
        if self.keys is None or self.end - self.base + count > self.keys.shape[2]:
            self._grow(count, keys, values)
        at = self.end - self.base
        self.keys[..., at : at + count, :] = keys
        self.values[..., at : at + count, :] = values
        self.end += count

    def begin_with(self, keys: list[Any], values: list[Any], base: int) -> None:
        """Start with copies of the parts `keys` and `values`, in order, as tokens from `base` on."""
        count = sum(part.shape[2] for part in keys)
        more = capacity(count + 1) - count
        self.keys = mx.concatenate([*keys, _zeros(keys[0], more)], axis=2)
        self.values = mx.concatenate([*values, _zeros(values[0], more)], axis=2)
        self.base, self.end = base, base + count
        self.nbytes = int(self.keys.nbytes + self.values.nbytes)

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        assert self.base <= end <= self.end
        if end < self.end:
            self.leave()
            self.end = end

    def last(self, count: int) -> tuple[Any, Any]:
        """Keys and values of the last `count` tokens."""
        return self.between(self.end - count, self.end)

    def between(self, start: int, end: int) -> tuple[Any, Any]:
        """Keys and values of tokens `start` to `end`, which must be there."""
        assert self.base <= start <= end <= self.end
        a, b = start - self.base, end - self.base
        if self.stack is not None:
            return self.stack.part(self.row, a, b)
        if a == 0 and b == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., a:b, :], self.values[..., a:b, :]

    def _first_kept(self) -> int:
        """The first token that stays when the buffers grow."""
        return max(self.base, self.end - (self.window - 1 + self.slack)) if self.window else self.base

    def _grow(self, count: int, keys: Any, values: Any) -> None:
        start = self._first_kept()
        kept = self.end - start
        more = capacity(kept + count) - kept
        self.keys = self._grown(self.keys, start, _zeros(keys, more))
        self.values = self._grown(self.values, start, _zeros(values, more))
        self.nbytes = int(self.keys.nbytes + self.values.nbytes)
        self.base = start

    def _grown(self, old: Any, start: int, tail: Any) -> Any:
        if start == self.end:
            return tail
        return mx.concatenate([old[..., start - self.base : self.end - self.base, :], tail], axis=2)


def capacity(count: int) -> int:
    """Tokens that the arrays for `count` of them have space for."""
    return -(-count // STEP) * STEP


def _zeros(like: Any, count: int) -> Any:
    return mx.zeros((1, like.shape[1], count, like.shape[3]), like.dtype)
