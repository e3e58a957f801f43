"""Layer caches of the contiguous backend: attention over each sequence's own buffers by MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...mlxlm import FETCHED, Window
from .buffer import Buffer


@dataclass(slots=True, eq=False)
class PlacedSegment:
    """Tokens `first` to `first + count` of a batch, up to position `end` of a sequence with `buffers`, one a layer."""

    first: int
    count: int
    end: int
    buffers: Sequence[Buffer]


@dataclass
class ContiguousPass:
    """A step's data that all layers share: segments of one token, longer ones behind them, the tokens' positions
    (T,)."""

    singles: Sequence[PlacedSegment] = ()
    longer: Sequence[PlacedSegment] = ()
    positions: Any = None

    def clear(self) -> None:
        """Keep no sequence that leaves."""
        self.singles = self.longer = ()


class ContiguousLayer:
    """Layer `index`; `window` is 0 where it sees everything. With `matmuls`, the attention of single tokens is two
    matrix products and a softmax: fewer operations, where each is a task for a thread, as on the CPU."""

    def __init__(self, index: int, window: int, step: ContiguousPass, *, matmuls: bool) -> None:
        self._index = index
        self._window = window
        self._step = step
        self._matmuls = matmuls

    @property
    def offset(self) -> Any:
        """Positions (T,) of the batch's tokens."""
        return self._step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask, as `attend` knows it; or the window, where only the model knows it."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append each sequence's part of `keys` and `values` (T, kv heads, 1, D) to its buffers."""
        count = len(self._step.singles)
        for segment, own_keys, own_values in zip(
            self._step.singles, _rows(keys, count), _rows(values, count), strict=True
        ):
            self._buffer(segment).append(own_keys, own_values)
        for segment in self._step.longer:
            self._buffer(segment).append(_part_of(keys, segment), _part_of(values, segment))
        return FETCHED.put(self, keys, values)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the pass's keys and values, for a layer that shares them."""
        return FETCHED.of(self)

    def attend(self, queries: Any, keys: Any, values: Any, scale: float, window: int, sinks: Any | None) -> Any:
        """Causal attention (T, query heads, 1, D) of `queries` of that shape, each token over its own sequence. `keys`
        and `values` are what `update_and_fetch` returned: the self-test checks that."""
        window = min(filter(None, (window, self._window)), default=0)
        parts = self._attend_singles(queries, scale, window, sinks)
        for segment in self._step.longer:
            parts.append(self._attend_longer(_part_of(queries, segment), segment, scale, window, sinks))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_singles(self, queries: Any, scale: float, window: int, sinks: Any | None) -> list[Any]:
        seen = [self._seen(segment, window) for segment in self._step.singles]
        if not seen:
            return []
        if not self._matmuls or sinks is not None:
            rows = _rows(queries, len(seen))
            return [_fused(own, *kv, scale=scale, sinks=sinks) for own, kv in zip(rows, seen, strict=True)]
        # The queries of one kv head are as good as a longer query that sees everything.
        count, heads = len(seen), seen[0][0].shape[1]
        grouped = (queries[:count] * scale).reshape(count, heads, -1, queries.shape[-1])
        parts = [_attend_by_matmuls(own, *kv) for own, kv in zip(_rows(grouped, count), seen, strict=True)]
        out = parts[0] if count == 1 else mx.concatenate(parts)
        return [out.reshape(count, -1, 1, out.shape[-1])]

    def _attend_longer(self, queries: Any, segment: PlacedSegment, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (n, query heads, 1, D) of one segment with `queries` (1, query heads, n, D)."""
        keys, values = self._seen(segment, window)
        seen = keys.shape[2]
        mask: Any = "causal"
        if window and segment.end > window:
            mask = _window_mask(segment.count, seen, window)
        out = _fused(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out[0].transpose(1, 0, 2)[:, :, None]

    def _seen(self, segment: PlacedSegment, window: int) -> tuple[Any, Any]:
        """Keys and values that the segment's tokens see."""
        seen = min(segment.end, window - 1 + segment.count) if window else segment.end
        return self._buffer(segment).last(seen)

    def _buffer(self, segment: PlacedSegment) -> Buffer:
        return segment.buffers[self._index]


_fused = mx.fast.scaled_dot_product_attention


def _attend_by_matmuls(queries: Any, keys: Any, values: Any) -> Any:
    """Attention of scaled queries without a mask."""
    return mx.softmax(queries @ keys.swapaxes(-1, -2), axis=-1, precise=True) @ values


def _rows(array: Any, count: int) -> list[Any]:
    """The first `count` of `array` along its first axis, each as (1, ...)."""
    if count > 1:
        return list(mx.split(array if array.shape[0] == count else array[:count], count))
    return [array[:count]] if count else []


def _part_of(array: Any, segment: PlacedSegment) -> Any:
    """The segment's part (1, heads, n, D) of `array` (T, heads, 1, D)."""
    return array[segment.first : segment.first + segment.count, :, 0].transpose(1, 0, 2)[None]


def _window_mask(count: int, seen: int, window: int) -> Any:
    """Mask (count, seen) of the last `count` tokens over the last `seen`, each with a window."""
    own = mx.arange(seen - count, seen)[:, None]
    others = mx.arange(seen)[None]
    return (others <= own) & (others > own - window)
