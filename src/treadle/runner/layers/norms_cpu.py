"""A model's root-mean-square norms on the CPU, in compiled functions (`device.norm_cpu`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device.norm_cpu import FEW_NUMBERS, normed
from ..fused.norms import Norm
from .replace import Faster, Makers, own_call

_KINDS = (
    "mlx.nn.layers.normalization.RMSNorm",
    "mlx_lm.models.gemma.RMSNorm",
    "mlx_lm.models.gemma2.RMSNorm",
    "mlx_lm.models.gemma3_text.RMSNorm",
)
_GATED = "mlx_lm.models.qwen3_next.Qwen3NextRMSNormGated"


def makers() -> Makers:
    """Makers by the full names of classes."""
    return {**dict.fromkeys(_KINDS, _rms_norm), _GATED: partial(_rms_norm, gated=True)}


def _rms_norm(layer: Any, *, gated: bool = False) -> Faster | None:
    norm = Norm.of(layer, mx.float32)
    if not norm.known or layer.weight.dtype != mx.float32:
        return None
    columns = int(layer.weight.shape[0])
    call = partial(_call, own_call(layer), norm.weight, norm.eps)  # without `norm`, which has the layer
    kind, label = (type(layer), columns, norm.eps), f"norms of {columns}"
    return Faster({"__call__": call}, kind, label, lambda: _examples(columns, 2 if gated else 1))


def _call(own: Callable[..., Any], weight: Any, eps: float, x: Any, gate: Any | None = None) -> Any:
    if x.dtype != mx.float32:
        return own(x) if gate is None else own(x, gate)
    y = normed(x, eps, weight)
    return y if gate is None else _times_silu(y, gate)


@partial(mx.compile, shapeless=True)
def _times_silu(y: Any, gate: Any) -> Any:
    return nn.silu(gate) * y


def _examples(columns: int, arguments: int) -> Iterator[tuple[Any, ...]]:
    for rows in (1, 3, FEW_NUMBERS // columns + 1):
        keys = mx.random.split(mx.random.key(rows), arguments)
        yield tuple(mx.random.normal((rows, 1, columns), key=key) for key in keys)
