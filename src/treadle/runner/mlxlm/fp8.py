"""Weights in FP8 with scales of their own, as Mistral, Qwen and DeepSeek publish them.

A scale counts for a tensor, or for each of its blocks. Some of mlx-lm's classes dequantize such weights, some refuse
their scales, and its Ministral 3 reads their bytes as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .hooks import sanitizing

_SCALE = "_scale_inv"
_OF_ACTIVATIONS = (".activation_scale", ".input_scale")
_SIDE = 128


def is_scaled(names: Mapping[str, Any]) -> bool:
    """Whether tensors by these names have scales of FP8."""
    return any(name.endswith(_SCALE) for name in names)


def dequantizing(model: Any, config: Mapping[str, Any]) -> Any:
    """Return the class `model`, made to dequantize FP8 before it changes weights."""
    return sanitizing(model, lambda module, own, weights: own(dequantized(weights, config)))


def dequantized(weights: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `weights` with those in FP8 as bfloat16, and without their scales and those of activations. Blocks have
    the size that `config` says. Scales that are powers of two in a byte are left to mlx-lm."""
    blocks, found = _blocks(config), dict(weights)
    for name, scale in weights.items():
        of = name.removesuffix(_SCALE)
        if of != name and of in weights and weights[of].dtype == mx.uint8 and mx.issubdtype(scale.dtype, mx.floating):
            found[of] = _scaled(mx.from_fp8(weights[of], dtype=mx.bfloat16), found.pop(name), blocks)
            for ending in _OF_ACTIVATIONS:
                found.pop(of.removesuffix(".weight") + ending, None)
    return found


def _blocks(config: Mapping[str, Any]) -> tuple[int, int]:
    stored = config.get("quantization_config")
    sides = stored.get("weight_block_size") if isinstance(stored, Mapping) else None
    rows, columns = sides or (_SIDE, _SIDE)
    return int(rows), int(columns)


def _scaled(weight: Any, scale: Any, blocks: tuple[int, int]) -> Any:
    """Return a weight (..., m, n) times its scale: of all of it, or of each block, (..., m / rows, n / columns) up."""
    if scale.ndim == weight.ndim and scale.size > 1:
        for axis, side in zip((-2, -1), blocks, strict=True):
            scale = mx.repeat(scale, side, axis=axis)
        scale = scale[..., : weight.shape[-2], : weight.shape[-1]]
    return (weight * scale).astype(mx.bfloat16)
