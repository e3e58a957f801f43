"""Rotary positions (RoPE; Su et al., 2021) of mlx-lm's modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..mlxlm import RotaryAxes
from .kernels import LayerKernels

_BY_FREQUENCIES = ("Llama3RoPE", "YarnRoPE", "ProportionalRoPE", "DynamicNTKAlphaRoPE")
"""Classes that keep the frequencies of their dimensions as wavelengths, whatever scaled them."""


@dataclass(frozen=True)
class Rotary:
    """Rotation of the first R dimensions of a head: `inv_freq` (R / 2,) are radians a position, and rotated dimensions
    are multiplied by `scale` (YaRN; Peng et al., 2023). Pairs are `interleaved`, or R / 2 apart."""

    inv_freq: Any
    scale: float = 1.0
    interleaved: bool = False

    @classmethod
    def of(cls, rope: Any) -> Rotary | None:
        """The rotation by a module; None where it rotates nothing. Raises NotImplementedError where it is not known."""
        name = type(rope).__name__
        if name == "NoPE":
            return None
        if type(rope) is nn.RoPE:
            exponents = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
            inv_freq = rope.scale * mx.power(mx.array(rope.base, mx.float32), -exponents)
            return cls(inv_freq, 1.0, bool(rope.traditional))
        if name in _BY_FREQUENCIES:
            scale = float(getattr(rope, "mscale", 1.0))
            return cls(1.0 / rope._freqs.astype(mx.float32), scale, bool(getattr(rope, "traditional", False)))
        if name == "SuScaledRoPE":
            return cls(1.0 / rope._freqs.astype(mx.float32), float(rope._scale))
        raise NotImplementedError(f"positions by {name}")

    @property
    def dims(self) -> int:
        """Rotated dimensions."""
        return 2 * int(self.inv_freq.shape[0])

    def cos_sin(self, positions: Any, axes: RotaryAxes | None, kernels: LayerKernels) -> Any:
        """Cosines and sines (T, R / 2, 2), float32, of `positions` (T,), by `kernels`; or of positions (T, 3) of three
        `axes`, by MLX: few passes have them."""
        if positions.ndim == 1:
            return kernels.cos_sin(positions, self.inv_freq, self.scale)
        assert axes is not None
        angles = positions[:, mx.array(axes.of_pairs(self.dims // 2))].astype(mx.float32) * self.inv_freq
        return mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1) * self.scale

    def equals(self, other: Rotary) -> bool:
        """Whether cosines and sines are the same."""
        return self.scale == other.scale and bool(mx.array_equal(self.inv_freq, other.inv_freq).item())
