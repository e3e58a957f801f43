"""Norms of mlx-lm's modules, as kernels and MLX's functions compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..mlxlm import SelectingNorm


@dataclass(frozen=True)
class _Kind:
    """A class of norms: `centered` ones subtract the mean (layer norms); `offset` is added to the weight."""

    centered: bool = False
    offset: float = 0.0


_RMS, _RMS_OFFSET = _Kind(), _Kind(offset=1.0)
_KINDS = {
    "mlx.nn.layers.normalization.RMSNorm": _RMS,
    "mlx.nn.layers.normalization.LayerNorm": _Kind(centered=True),
    "mlx_lm.models.gemma.RMSNorm": _RMS_OFFSET,
    "mlx_lm.models.gemma2.RMSNorm": _RMS_OFFSET,
    "mlx_lm.models.gemma3_text.RMSNorm": _RMS_OFFSET,
    "mlx_lm.models.qwen3_next.Qwen3NextRMSNormGated": _RMS,
    "mlx_lm.models.nemotron.NemotronLayerNorm1P": _Kind(centered=True, offset=1.0),
}
"""By a class's full name. The self-test of the backend catches one that has changed."""


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension, with `weight` (W,) and `bias` (W,), if any; `module` is mlx-lm's own.

    Its root mean square, or its deviation where it is `centered`, becomes 1. The norm is not `known` where its class
    isn't, or it has no weight: then `module` computes it.
    """

    module: Any
    weight: Any | None = None
    bias: Any | None = None
    eps: float = 0.0
    centered: bool = False

    @classmethod
    def of(cls, module: Any, dtype: Any) -> Norm:
        """The norm of a module that computes in `dtype`."""
        if isinstance(module, SelectingNorm):
            module = module.norm
        kind, weight = _KINDS.get(_full_name(module)), module.get("weight")
        if kind is None or weight is None:
            return cls(module)
        weight = (weight + kind.offset if kind.offset else weight).astype(dtype)
        bias = module.get("bias")
        bias = None if bias is None else bias.astype(dtype)
        mx.eval(weight, bias)  # not in each pass
        return cls(module, weight, bias, float(module.eps), kind.centered)

    @property
    def known(self) -> bool:
        return self.weight is not None

    def alike(self, other: Norm) -> bool:
        """Whether another one differs in its weight only."""
        known = self.known and other.known and self.bias is None and other.bias is None
        return known and (self.eps, self.centered) == (other.eps, other.centered)

    def __call__(self, x: Any) -> Any:
        """`x` (T, W), normalized by MLX."""
        if not self.known:
            return self.module(x[:, None])[:, 0]
        if self.centered:
            return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)
        return mx.fast.rms_norm(x, self.weight, self.eps)


def _full_name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
