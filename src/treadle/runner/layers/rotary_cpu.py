"""Rotary embeddings on the CPU: sines and cosines once a pass instead of in every layer, for queries and for keys.

MLX computes a rotation there by two dozen operations, most of which make the same angles. A ragged batch's layers share
one array of positions, by which its tables are found again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from .replace import Faster, Makers, full_name, own_call

_SCALED = "mlx_lm.models.rope_utils"
_KINDS = (
    "mlx.nn.layers.positional_encoding.RoPE",
    f"{_SCALED}.Llama3RoPE",
    f"{_SCALED}.ProportionalRoPE",
    f"{_SCALED}.SuScaledRoPE",
    f"{_SCALED}.YarnRoPE",
)


@partial(mx.compile, shapeless=True)
def _combined(x: Any, partners: Any, own: Any, other: Any) -> Any:
    return x * own + partners * other


class RotaryTables:
    """Factors of the last positions, by the rotation `own`, which turns the first `dims` numbers: neighbours where it
    is `traditional`, else those half of them apart."""

    def __init__(self, own: Callable[..., Any], dims: int, *, traditional: bool) -> None:
        self._own = own
        self._dims = dims
        self._traditional = traditional
        self._positions: Any = None
        self._factors: dict[int, tuple[Any, Any]] = {}

    def rotate(self, x: Any, positions: Any) -> Any:
        """Rotate `x` (T, heads, 1, D) to `positions` (T,)."""
        if positions is not self._positions:
            self._positions, self._factors = positions, {}
        width = x.shape[-1]
        if width not in self._factors:
            self._factors[width] = self._new_factors(width)
        return _combined(x, self._partners(x), *self._factors[width])

    def _partners(self, x: Any) -> Any:
        """Each number's partner in its rotation, in the place of the number."""
        if not self._traditional:
            borders = [self._dims // 2, self._dims] if self._rest(x) else [self._dims // 2]
            first, second, *rest = mx.split(x, borders, axis=-1)
            return mx.concatenate([second, first, *rest], axis=-1)
        pairs = mx.unflatten(x[..., : self._dims], -1, (-1, 2))[..., ::-1].flatten(-2)
        return mx.concatenate([pairs, x[..., self._dims :]], axis=-1) if self._rest(x) else pairs

    def _rest(self, x: Any) -> int:
        return int(x.shape[-1]) - self._dims

    def _new_factors(self, width: int) -> tuple[Any, Any]:
        """Factors (T, 1, 1, D) of each number and of its partner: what the rotation makes of a one and a zero."""
        count, half = self._positions.shape[0], self._dims // 2
        unit = np.ones(width, np.float32)
        unit[slice(1, self._dims, 2) if self._traditional else slice(half, self._dims)] = 0
        made = self._own(mx.broadcast_to(mx.array(unit), (count, 1, 1, width)), self._positions)
        turned, rest = made[..., : self._dims], made[..., self._dims :]
        pairs, axis = ((-1, 2), -1) if self._traditional else ((2, -1), -2)
        cosines, sines = mx.split(mx.unflatten(turned, -1, pairs), 2, axis=axis)
        own = mx.concatenate([cosines, cosines], axis=axis).flatten(-2)
        other = mx.concatenate([-sines, sines], axis=axis).flatten(-2)
        if not width - self._dims:
            return own, other
        return mx.concatenate([own, rest], axis=-1), mx.concatenate([other, mx.zeros_like(rest)], axis=-1)


class RotaryMakers:
    """Makers for rotations. Layers with the same parameters share their tables."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, RotaryTables] = {}

    @property
    def makers(self) -> Makers:
        return dict.fromkeys(_KINDS, self._rotary)

    def _rotary(self, layer: Any) -> Faster | None:
        dims, traditional = _dims(layer), bool(getattr(layer, "traditional", False))
        own, kind = own_call(layer), _parameters(layer)
        tables = self._tables.setdefault(kind, RotaryTables(own, dims, traditional=traditional))
        call = partial(_rotated, own, tables)
        return Faster({"__call__": call}, kind, f"rotary embeddings of {dims}", partial(_examples, dims))


def _rotated(own: Callable[..., Any], tables: RotaryTables, x: Any, offset: Any = 0, **more: Any) -> Any:
    """Rotate `x` to the positions `offset`: by tables where it has one token of many sequences, else by `own`."""
    single = isinstance(offset, mx.array) and offset.shape == x.shape[:1] and x.shape[2:-1] == (1,)
    if more or not single or x.dtype != mx.float32:
        return own(x, offset, **more)
    return tables.rotate(x, offset)


def _dims(layer: Any) -> int:
    return int(layer.dims if hasattr(layer, "dims") else layer.dim)


def _parameters(layer: Any) -> Hashable:
    """The class of a rotation and all its numbers."""
    values = {**vars(layer), **layer}
    numbers = [
        (name, np.array(value).tobytes() if isinstance(value, mx.array) else repr(value))
        for name, value in sorted(values.items())
    ]
    return full_name(type(layer)), tuple(numbers)


def _examples(dims: int) -> Iterator[tuple[Any, Any]]:
    for tokens, width in ((1, dims), (5, dims), (5, 2 * dims)):
        key = mx.random.key(tokens)
        yield mx.random.normal((tokens, 3, 1, width), key=key), mx.random.randint(0, 2000, (tokens,), key=key)
