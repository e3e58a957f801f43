"""The root-mean-square norm for a CPU, in compiled functions.

MLX computes it there by a dozen operations, which for a few tokens take longer to start than to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

FEW_NUMBERS = 4096
"""The largest input that is scaled in the function that makes its factors: it makes them anew for each number."""

_Norm = Callable[..., Any]


def normed(x: Any, eps: float, *scale: Any) -> Any:
    """`x` (..., columns) in float32, its root mean square made 1, times each `scale`, of which there may be none."""
    few, factors, many = _compiled(int(x.shape[-1]), eps)
    return few(x, *scale) if x.size <= FEW_NUMBERS else many(x, factors(_squares(x)), *scale)


@cache
def _compiled(columns: int, eps: float) -> tuple[_Norm, _Norm, _Norm]:
    """The norm of few numbers, and that of many as two functions: of sums of squares, and of numbers with factors."""

    def factors(squares: Any) -> Any:
        return mx.rsqrt(squares * (1 / columns) + eps)

    def scaled(x: Any, *factors: Any) -> Any:
        for factor in factors:
            x = x * factor
        return x

    few = mx.compile(lambda x, *scale: scaled(x, factors(_squares(x)), *scale), shapeless=True)
    return few, mx.compile(factors, shapeless=True), mx.compile(scaled, shapeless=True)


def _squares(x: Any) -> Any:
    return mx.sum(mx.square(x), axis=-1, keepdims=True)
