"""What a model takes for a layer's cache, over rows with buffers of their own: attention by MLX's stock operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..flat import Placed
from ..mlxlm import Window
from .buffer import Buffer


@dataclass
class Pass:
    """What all layers share in a step: the pieces, and their tokens' positions (T,) int32."""

    placed: Sequence[Placed] = ()
    positions: Any = None
    rows: Mapping[str, Sequence[Buffer]] = field(default_factory=dict)


class StockLayer:
    """Layer `index`; `window` is 0 where it sees everything. `group` queries of one kv head as if they were a longer
    query where that is faster."""

    def __init__(self, index: int, window: int, step: Pass, *, group: bool) -> None:
        self._index = index
        self._window = window
        self._step = step
        self._group = group

    @property
    def offset(self) -> Any:
        """Positions (T,) of the pass's tokens."""
        return self._step.positions

    def make_mask(self, count: int = 1, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """No mask: `attend` knows who sees what, but for a window that only the model knows of."""
        return None if window_size is None else Window(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Give each row its part of `keys` and `values` (T, kv heads, 1, D)."""
        for piece in self._step.placed:
            buffer = self._step.rows[piece.id][self._index]
            buffer.append(_row_of(keys, piece), _row_of(values, piece))
        return keys, values

    def attend(self, queries: Any, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (T, query heads, 1, D) of `queries` of that shape over each token's own row up to itself."""
        window = min(filter(None, (window, self._window)), default=0)
        parts = [self._piece(_row_of(queries, piece), piece, scale, window, sinks) for piece in self._step.placed]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _piece(self, queries: Any, piece: Placed, scale: float, window: int, sinks: Any | None) -> Any:
        """Attention (n, query heads, 1, D) of one piece, whose `queries` are (1, query heads, n, D)."""
        buffer = self._step.rows[piece.id][self._index]
        seen = min(piece.end, window - 1 + piece.count) if window else piece.end
        keys, values = buffer.last(seen)
        if piece.count == 1:
            return self._single(queries, keys, values, scale, sinks)
        mask: Any = "causal"
        if window and piece.end > window:
            mask = _window_mask(piece.count, seen, window)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return out[0].transpose(1, 0, 2)[:, :, None]

    def _single(self, queries: Any, keys: Any, values: Any, scale: float, sinks: Any | None) -> Any:
        shape, heads = queries.shape, keys.shape[1]
        if self._group and sinks is None and shape[1] > heads:
            queries = queries.reshape(1, heads, shape[1] // heads, shape[3])
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, sinks=sinks)
        return out.reshape(*shape[:3], out.shape[-1])


def _row_of(array: Any, piece: Placed) -> Any:
    """The piece's part (1, heads, n, D) of `array` (T, heads, 1, D)."""
    part = array[piece.first : piece.first + piece.count]
    return part if piece.count == 1 else part[:, :, 0].transpose(1, 0, 2)[None]


def _window_mask(count: int, seen: int, window: int) -> Any:
    """Which of the last `seen` tokens each of the last `count` sees, (count, seen) booleans."""
    own = mx.arange(seen - count, seen)[:, None]
    others = mx.arange(seen)[None]
    return (others <= own) & (others > own - window)
