"""Convolution of a part of a product's outputs, as mixers have it between their projections and their recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np


@dataclass(frozen=True)
class Mixing:
    """Causal convolution of some outputs of a product.

    `columns` (C + E,) int32 are the outputs that the C convolved channels are made of, and E more that are passed on as
    they are. `weight` is (C, width, 1), `bias` (C,) if any. With `silu` the convolution's output goes through SiLU.
    With `gates`, the columns of channel 0's factors, inputs are first multiplied by the one and outputs by the other;
    those of other channels follow.
    """

    columns: Any
    weight: Any
    bias: Any | None = None
    silu: bool = False
    gates: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        columns: Sequence[int],
        convolutions: Sequence[Any],
        *,
        silu: bool = False,
        gates: tuple[int, int] | None = None,
    ) -> Mixing:
        """The convolution by MLX's layers, side by side, of an equal number of channels each."""
        weight = mx.contiguous(mx.concatenate([one.weight for one in convolutions]))
        biases = [one.get("bias") for one in convolutions]
        bias = None if None in biases else mx.concatenate(biases)
        made = cls(mx.array(np.asarray(columns, np.int32)), weight, bias, silu, gates)
        mx.eval(made.columns, weight, bias)  # not in each pass
        return made

    @property
    def channels(self) -> int:
        """C."""
        return int(self.weight.shape[0])

    @property
    def width(self) -> int:
        """Inputs of a convolution's output."""
        return int(self.weight.shape[1])

    @property
    def outputs(self) -> int:
        """C + E."""
        return int(self.columns.shape[0])

    def inputs(self, x: Any) -> tuple[Any, Any]:
        """What is convolved (T, 1, C), and what is passed on (T, 1, E), of a product's outputs `x` (T, N)."""
        own = mx.take(x, self.columns, axis=-1)[:, None]
        convolved, rest = own[..., : self.channels], own[..., self.channels :]
        return (convolved if self.gates is None else convolved * self._gate(x, self.gates[0])), rest

    def finished(self, x: Any, convolved: Any, rest: Any) -> Any:
        """The outputs (T, 1, C + E), given the convolution's `convolved` (T, 1, C)."""
        y = nn.silu(convolved) if self.silu else convolved
        y = y if self.gates is None else y * self._gate(x, self.gates[1])
        return mx.concatenate([y, rest], axis=-1) if rest.size else y

    def _gate(self, x: Any, first: int) -> Any:
        return x[:, None, first : first + self.channels]
