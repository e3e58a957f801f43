"""Root-mean-square norms on the CPU, in compiled functions.

MLX computes such a norm there by a dozen operations, which for a few tokens take longer to start than to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..fused.norms import Norm
from .replace import Faster, Makers

_FEW_NUMBERS = 4096
"""The largest input that is scaled in the function that makes its factors: it makes them anew for each number."""
_KINDS = (
    "mlx.nn.layers.normalization.RMSNorm",
    "mlx_lm.models.gemma.RMSNorm",
    "mlx_lm.models.gemma2.RMSNorm",
    "mlx_lm.models.gemma3_text.RMSNorm",
)

_Norm = Callable[[Any, Any], Any]


def makers() -> Makers:
    """Makers by the full names of classes."""
    return dict.fromkeys(_KINDS, _rms_norm)


def _rms_norm(layer: Any) -> Faster | None:
    norm = Norm.of(layer, mx.float32)
    if not norm.known or layer.weight.dtype != mx.float32:
        return None
    columns = int(layer.weight.shape[0])
    call = partial(_normed, *_compiled(columns, norm.eps), norm.weight, norm.eps)
    return Faster(
        {"__call__": call}, (type(layer), columns, norm.eps), f"norms of {columns}", lambda: _examples(columns)
    )


def _normed(few: _Norm, many: _Norm, weight: Any, eps: float, x: Any) -> Any:
    if x.dtype != mx.float32:
        return mx.fast.rms_norm(x, weight, eps)
    return few(x, weight) if x.size <= _FEW_NUMBERS else many(x, weight)


@cache
def _compiled(columns: int, eps: float) -> tuple[_Norm, _Norm]:
    """Norms (..., columns) with a weight (columns,), for few numbers and for many."""

    def factors(squares: Any) -> Any:
        return mx.rsqrt(squares * (1 / columns) + eps)

    def scaled(x: Any, factors: Any, weight: Any) -> Any:
        return x * factors * weight

    compiled_factors, compiled_scaled = mx.compile(factors, shapeless=True), mx.compile(scaled, shapeless=True)
    few = mx.compile(lambda x, weight: scaled(x, factors(_squares(x)), weight), shapeless=True)
    return few, lambda x, weight: compiled_scaled(x, compiled_factors(_squares(x)), weight)


def _squares(x: Any) -> Any:
    return mx.sum(mx.square(x), axis=-1, keepdims=True)


def _examples(columns: int) -> Iterator[tuple[Any]]:
    for rows in (1, 3, _FEW_NUMBERS // columns + 1):
        yield (mx.random.normal((rows, 1, columns), key=mx.random.key(rows)),)
