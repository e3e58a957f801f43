"""Kernels around the experts of a mixture, on CUDA: the choice of a token's experts, and the sum of their outputs.

MLX's operations take five to eight launches for the choice and two or three for the sum: for a few tokens, more than
the experts' own products.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..device.cuda import CudaKernel, NewKernel, bits_of

Numbers = npt.NDArray[np.float32]
MOST_TOP, MOST_EXPERTS, MOST_GROUPS = 32, 1024, 32
"""The most experts of a token, of a layer, and groups of them: a warp makes the choice."""
UNIT = 8
"""Outputs of an expert are a multiple of this."""
_FILES = ["device/numbers.cuh", "fused/mixture.cuh"]
_WARPS, _THREADS = 4, 256
_SMALLEST = -80.0
"""Logits below have no sigmoid in float32."""
CHOOSE = """
  treadle::choose_experts<EXPERTS, TOP, treadle::Score(SCORE), treadle::Rounds(ROUNDS), BIASED, NORMALIZED, GROUPS,
                          KEPT, SCALED, SHARED, GATED>(
      logits, bias, scales, chosen, weights, token, logits_shape[1], __int_as_float(EPSILON), __int_as_float(FACTOR));
"""
"""The choice by a warp for its `token`."""
_CHOOSE = f"""
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= logits_shape[0]) return;
{CHOOSE}"""
_COMBINE = """
  treadle::combine_experts<TOP, WIDTH, SHARED, GATED>(y, weights, shared, gate, out, y_shape[0]);
"""


class Score(IntEnum):
    """What becomes of a router's logits, as the kernel numbers it: a softmax over all experts, or over those that are
    chosen, or the sigmoid of each."""

    SOFTMAX = 0
    CHOSEN_SOFTMAX = 1
    SIGMOID = 2


class Rounds(IntEnum):
    """What a model rounds to the type of its logits: nothing, as it computes in float32, the scores, or the sums of
    scores and biases as well. Rounding makes many large sigmoids equal, of which the first ones are chosen."""

    NOTHING = 0
    SCORES = 1
    KEYS = 2


@dataclass(frozen=True)
class Choice:
    """Choice of `top` experts by the largest scores.

    `bias` (E,) is added to scores for the choice only. Where there are `groups` of neighboring experts, only those of
    the `kept` groups can be chosen whose two largest scores have the largest sums. Weights are the scores: `normalized`
    to a sum of 1, with `epsilon` added to the sum; times `factor`, and times `scales` (E,) of each expert. On the way
    the model rounds what `rounds` says. With `shared` one more expert, the one behind all others, is chosen by every
    token, with a weight of 1, or, if it is `gated`, the sigmoid of a logit behind those of experts.
    """

    top: int
    score: Score
    bias: Any | None = None
    groups: int = 1
    kept: int = 1
    normalized: bool = False
    epsilon: float = 0.0
    factor: float = 1.0
    scales: Any | None = None
    rounds: Rounds = Rounds.NOTHING
    shared: bool = False
    gated: bool = False

    @property
    def all(self) -> int:
        """Experts of a token."""
        return self.top + self.shared

    @property
    def numbers(self) -> tuple[Any, ...]:
        """What the kernel is compiled for."""
        arrays = self.bias is not None, self.scales is not None
        score = self.score, self.rounds
        return (
            self.top,
            *score,
            self.groups,
            self.kept,
            self.normalized,
            self.epsilon,
            self.factor,
            *arrays,
            self.shared,
            self.gated,
        )

    def inputs(self, logits: Any) -> list[Any]:
        """Arrays for the kernel."""
        return [logits, *(logits if one is None else one for one in (self.bias, self.scales))]

    def template(self, logits: Any) -> list[tuple[str, Any]]:
        """What the kernel is compiled for."""
        return [
            ("EXPERTS", logits.shape[1] - self.gated),
            ("TOP", self.top),
            ("SCORE", int(self.score)),
            ("ROUNDS", int(self.rounds)),
            ("BIASED", self.bias is not None),
            ("NORMALIZED", self.normalized),
            ("GROUPS", self.groups),
            ("KEPT", self.kept),
            ("SCALED", self.scales is not None),
            ("SHARED", self.shared),
            ("GATED", self.gated),
            ("EPSILON", bits_of(self.epsilon)),
            ("FACTOR", bits_of(self.factor)),
        ]

    def scores(self, logits: Any) -> Numbers:
        """Scores (T, E) of experts, for `logits` (T, E), an MLX array of the type that scores are rounded to. Those of
        CHOSEN_SOFTMAX are the logits."""
        numbers: Numbers = np.array(logits.astype(mx.float32))
        if self.score is Score.SIGMOID:
            numbers = (1 / (1 + np.exp(-np.maximum(numbers, _SMALLEST)))).astype(np.float32)
        elif self.score is Score.SOFTMAX:
            numbers = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
            numbers /= numbers.sum(axis=-1, keepdims=True)
        return numbers if self.rounds is Rounds.NOTHING else _rounded(numbers, logits.dtype)

    def keys(self, logits: Any) -> Numbers:
        """What experts are chosen by (T, E), for `logits` (T, E)."""
        scores = self.scores(logits)
        keys = scores if self.bias is None else scores + np.array(self.bias.astype(mx.float32))
        return _rounded(keys, logits.dtype) if self.rounds is Rounds.KEYS else keys

    def margins(self, logits: Any) -> Numbers:
        """How much better the last chosen expert (and group) is than the next one, for `logits` (T, E): (T,)."""
        of_experts = _margin(self.kept_keys(logits), self.top)
        if self.groups == 1:
            return of_experts
        return np.minimum(of_experts, _margin(self._sums(self.keys(logits)), self.kept))

    def kept_keys(self, logits: Any) -> Numbers:
        """The `keys`, with 0 for experts of groups that are not kept."""
        keys = self.keys(logits)
        if self.groups == 1:
            return keys
        sums = self._sums(keys)
        kept = sums >= np.sort(sums, axis=-1)[:, -self.kept, None]
        return np.where(kept[..., None], keys.reshape(*kept.shape, -1), 0).reshape(keys.shape)

    def _sums(self, keys: Numbers) -> Numbers:
        """The two largest `keys` (T, E) of each group, added up (T, groups)."""
        sums: Numbers = np.sort(keys.reshape(len(keys), self.groups, -1), axis=-1)[..., -2:].sum(axis=-1)
        return sums

    def takes(self, experts: int) -> bool:
        """Whether the kernel makes this choice out of so many experts."""
        fits = self.top <= experts and self.all <= MOST_TOP and experts <= MOST_EXPERTS
        in_groups = self.groups <= MOST_GROUPS and experts % self.groups == 0 and experts >= 2 * self.groups
        return fits and (self.groups == 1 or in_groups)


def _rounded(numbers: Numbers, dtype: Any) -> Numbers:
    return np.array(mx.array(numbers).astype(dtype).astype(mx.float32))


def _margin(keys: Numbers, top: int) -> Numbers:
    """Difference of the `top` largest of `keys` (T, N) to the next (T,)."""
    if top == keys.shape[1]:
        return np.full(len(keys), np.inf, np.float32)
    order = np.sort(keys, axis=-1)
    margin: Numbers = order[:, -top] - order[:, -top - 1]
    return margin


class MixtureKernels:
    """The kernels, made by `kernel`."""

    def __init__(self, kernel: NewKernel = CudaKernel) -> None:
        self._kernel = kernel

    def choose(self, logits: Any, choice: Choice, dtype: Any = mx.float32) -> tuple[Any, Any]:
        """The experts (T, all of a token), uint32, and their weights, alike and in `dtype`, for `logits` (T, E), of
        which there is one more if the choice is gated."""
        chosen, weights = _choose(self._kernel)(
            choice.inputs(logits),
            choice.template(logits),
            blocks=(-(-logits.shape[0] // _WARPS), 1),
            threads=32 * _WARPS,
            shapes=[(logits.shape[0], choice.all)] * 2,
            dtypes=[mx.uint32, dtype],
        )
        return chosen, weights

    def combine(self, y: Any, weights: Any, shared: Any | None = None, gate: Any | None = None) -> Any:
        """The sum (T, N) of experts' outputs `y` (T, k, N), N a multiple of UNIT, with `weights` (T, k); plus
        `shared` (T, N), times the sigmoid of `gate` (T, 1) if there is one."""
        tokens, top, width = y.shape
        return _combine(self._kernel)(
            [y, weights, y if shared is None else shared, y if gate is None else gate],
            [("TOP", top), ("WIDTH", width), ("SHARED", shared is not None), ("GATED", gate is not None)],
            blocks=(-(-tokens * width // UNIT // _THREADS), 1),
            threads=_THREADS,
            shapes=[(tokens, width)],
            dtypes=[y.dtype],
        )[0]


@cache
def _choose(kernel: NewKernel) -> CudaKernel:
    return kernel("choose_experts", ["logits", "bias", "scales"], ["chosen", "weights"], _CHOOSE, files=_FILES)


@cache
def _combine(kernel: NewKernel) -> CudaKernel:
    return kernel("combine_experts", ["y", "weights", "shared", "gate"], ["out"], _COMBINE, files=_FILES)
