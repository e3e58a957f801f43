"""Mask kernel for CUDA: bitmasks of allowed tokens applied to the logits of constrained rows, in one launch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core.compute_path import KernelName
from ..device.cuda import CudaKernel, NewKernel
from ..device.self_test import SelfTested, self_tested
from ..device.staging import Put, direct
from .bitmask import BITS, Words

_THREADS = 256
_TOGETHER = 8
_BODY = "treadle::mask<T, V, PER>(logits, words, words_shape[1], masked);"


class MaskKernel:
    """Masks rows of `vocabulary` logits. `kernel` makes the CUDA kernel."""

    def __init__(self, vocabulary: int, kernel: NewKernel = CudaKernel) -> None:
        self._vocabulary = vocabulary
        self._per = 1 if vocabulary % _TOGETHER else _TOGETHER
        self._blocks = -(-vocabulary // (_THREADS * self._per))
        files = ["device/numbers.cuh", "sampling/mask.cuh"]
        self._kernel = kernel("mask", ["logits", "words"], ["masked"], _BODY, files=files)

    def __call__(self, logits: Any, words: Words, put: Put) -> Any:
        """Return `logits` (R, V) with -inf where the bit of a token in `words` (R, W) int32 is 0."""
        (masked,) = self._kernel(
            [logits, *put(words)],
            [("T", logits.dtype), ("V", self._vocabulary), ("PER", self._per)],
            blocks=(self._blocks, logits.shape[0]),
            threads=_THREADS,
            shapes=[logits.shape],
            dtypes=[logits.dtype],
        )
        return masked


def mask_kernel(vocabulary: int, dtype: Any, kernel: NewKernel = CudaKernel) -> SelfTested[MaskKernel]:
    """The kernel for logits of `dtype` and of float32, with the outcome of its self-test."""
    return self_tested(
        KernelName.TOKEN_MASKS,
        lambda: MaskKernel(vocabulary, kernel),
        lambda made: _why_not(made, vocabulary, dtype) or _why_not(made, vocabulary, mx.float32),
        instead="MLX's operations mask the tokens of constrained requests",
    )


def _why_not(kernel: MaskKernel, vocabulary: int, dtype: Any) -> str:
    """Return what is wrong with logits that `kernel` masks; empty if nothing is."""
    dice = np.random.default_rng(0)
    words = dice.integers(-(2**31), 2**31, (3, -(-vocabulary // BITS)), np.int64).astype(np.int32)
    words[0], words[1] = 0, -1
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocabulary].astype(bool)
    logits = mx.array(dice.normal(0, 3, (3, vocabulary)).astype(np.float32)).astype(dtype)
    masked = kernel(logits, words, direct)
    expected = mx.where(mx.array(allowed), logits, mx.array(-np.inf, dtype))
    return "" if mx.array_equal(masked, expected).item() else "it masks other tokens than those without a bit"
