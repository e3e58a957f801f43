"""Ways of quantizing weights, as MLX knows them."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

AFFINE = "affine"
MODES = (AFFINE, "mxfp4", "mxfp8", "nvfp4")
"""Modes, in the order of their numbers in kernels (`quantized.cuh`)."""
WIDTHS = (2, 3, 4, 5, 6, 8)
"""Bits of a weight that kernels unpack."""


class Quantization(NamedTuple):
    """A weight's `bits`, the columns of a `group` that shares a scale, and MLX's `mode`. Only "affine" has biases."""

    bits: int
    group: int
    mode: str = AFFINE

    @classmethod
    def of(cls, layer: Any) -> Quantization:
        """The quantization of a layer of MLX's."""
        return cls(int(layer.bits), int(layer.group_size), str(getattr(layer, "mode", AFFINE)))

    @property
    def number(self) -> int:
        """The mode's number in kernels."""
        return MODES.index(self.mode)

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group}" if self.mode == AFFINE else self.mode

    def columns(self, weight: Any) -> int:
        """Columns of a packed weight (..., K * bits / 32)."""
        return int(weight.shape[-1]) * 32 // self.bits

    def quantize(self, weight: Any) -> tuple[Any, Any, Any | None]:
        """Packed weights, their scales, and biases where the mode has them."""
        packed, scales, *biases = mx.quantize(weight, group_size=self.group, bits=self.bits, mode=self.mode)
        return packed, scales, biases[0] if biases else None

    def dequantize(self, weight: Any, scales: Any, biases: Any | None, dtype: Any | None = None) -> Any:
        """The weights (N, K), in the type of affine scales or in `dtype`."""
        return mx.dequantize(weight, scales, biases, group_size=self.group, bits=self.bits, mode=self.mode, dtype=dtype)

    def multiply(self, x: Any, weight: Any, scales: Any, biases: Any | None) -> Any:
        """x W^T by MLX."""
        return mx.quantized_matmul(
            x, weight, scales, biases, transpose=True, group_size=self.group, bits=self.bits, mode=self.mode
        )
