"""Layer caches of the contiguous backend: attention over each sequence's own buffers by MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...mlxlm import Window
from .buffer import Buffer


@dataclass(slots=True, eq=False)
class PlacedSegment:
    """Tokens `first` to `first + count` of a batch, up to position `end` of a sequence with `buffers`, one a layer."""

    first: int
    count: int
    end: int
    buffers: Sequence[Buffer]


@dataclass
class Pass:
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

    def __init__(self, index: int, window: int, step: Pass, *, matmuls: bool) -> None:
        self._index = index
        self._window = window
        self._step = step
        self._matmuls = matmuls

    @property
    def offset(self) -> Any:
        """Positions (T,) of the pass's tokens."""
        return self._step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask: `attend` knows who sees what, but for a window that only the model knows of."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Give each row its part of `keys` and `values` (T, kv heads, 1, D)."""
        count = len(self._step.singles)
        for piece, own_keys, own_values in zip(
            self._step.singles, _rows(keys, count), _rows(values, count), strict=True
        ):
            self._buffer(piece).append(own_keys, own_values)
        for piece in self._step.longer:
            self._buffer(piece).append(_piece_of(keys, piece), _piece_of(values, piece))
        return keys, values

    def attend(self, queries: Any, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (T, query heads, 1, D) of `queries` of that shape over each token's own row up to itself."""
        window = min(filter(None, (window, self._window)), default=0)
        parts = self._attend_singles(queries, scale, window, sinks)
        for piece in self._step.longer:
            parts.append(self._attend_longer(_piece_of(queries, piece), piece, scale, window, sinks))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_singles(self, queries: Any, scale: float, window: int, sinks: Any | None) -> list[Any]:
        seen = [self._seen(piece, window) for piece in self._step.singles]
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

    def _attend_longer(self, queries: Any, piece: PlacedSegment, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (n, query heads, 1, D) of one piece, whose `queries` are (1, query heads, n, D)."""
        keys, values = self._seen(piece, window)
        seen = keys.shape[2]
        mask: Any = "causal"
        if window and piece.end > window:
            mask = _window_mask(piece.count, seen, window)
        out = _fused(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out[0].transpose(1, 0, 2)[:, :, None]

    def _seen(self, piece: PlacedSegment, window: int) -> tuple[Any, Any]:
        """Keys and values of all that the piece's tokens see."""
        seen = min(piece.end, window - 1 + piece.count) if window else piece.end
        return self._buffer(piece).last(seen)

    def _buffer(self, piece: PlacedSegment) -> Buffer:
        return piece.buffers[self._index]


_fused = mx.fast.scaled_dot_product_attention


def _attend_by_matmuls(queries: Any, keys: Any, values: Any) -> Any:
    """Attention of scaled queries that see everything."""
    return mx.softmax(queries @ keys.swapaxes(-1, -2), axis=-1, precise=True) @ values


def _rows(array: Any, count: int) -> list[Any]:
    """The first `count` of `array` along its first axis, each as (1, ...)."""
    if count > 1:
        return list(mx.split(array if array.shape[0] == count else array[:count], count))
    return [array[:count]] if count else []


def _piece_of(array: Any, piece: PlacedSegment) -> Any:
    """The piece's part (1, heads, n, D) of `array` (T, heads, 1, D)."""
    return array[piece.first : piece.first + piece.count, :, 0].transpose(1, 0, 2)[None]


def _window_mask(count: int, seen: int, window: int) -> Any:
    """Which of the last `seen` tokens each of the last `count` sees, (count, seen) booleans."""
    own = mx.arange(seen - count, seen)[:, None]
    others = mx.arange(seen)[None]
    return (others <= own) & (others > own - window)
