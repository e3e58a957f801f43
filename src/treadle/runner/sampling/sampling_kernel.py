"""Sampling kernel for CUDA: temperature, top_k, top_p, min_p and the draw in one launch for all rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ...core.compute_path import KernelName
from ...core.messages import Sampling, Submit
from ..device.cuda import CudaKernel, NewKernel
from ..device.self_test import SelfTested, self_tested
from .sampler import SamplingRow, draw

_THREADS = 512
_TOGETHER = 8
_BODY = "treadle::draw<T, V, PER>(logits, asked, tokens, spilled);"


class SamplingKernel:
    """Draws tokens for rows of `vocabulary` logits of `dtype`; other types are copied to float32 first. `kernel` makes
    the CUDA kernel."""

    def __init__(self, vocabulary: int, dtype: Any, kernel: NewKernel = CudaKernel) -> None:
        self._vocabulary = vocabulary
        self._dtype = dtype
        files = ["device/numbers.cuh", "sampling/draw.cuh"]
        self._kernel = kernel("draw", ["logits", "asked"], ["tokens", "spilled"], _BODY, files=files)

    def __call__(self, logits: Any, inputs: Any) -> tuple[Any, Any]:
        """Return tokens (B,) int32 for `logits` (B, V), given `inputs` (B, 6) int32 of `kernel_inputs`. And flags (B,)
        int32: 1 for a row without a token, whose candidates at the border of the nucleus are too many to sort."""
        if logits.dtype != self._dtype:
            logits = logits.astype(mx.float32)
        count = logits.shape[0]
        tokens, spilled = self._kernel(
            [logits, inputs],
            [("T", logits.dtype), ("V", self._vocabulary), ("PER", 1 if self._vocabulary % _TOGETHER else _TOGETHER)],
            blocks=(count, 1),
            threads=_THREADS,
            shapes=[(count,), (count,)],
            dtypes=[mx.int32, mx.int32],
        )
        return tokens, spilled


def sampling_kernel(vocabulary: int, dtype: Any, kernel: NewKernel = CudaKernel) -> SelfTested[SamplingKernel]:
    """The kernel for logits of `dtype`, with the outcome of its self-test."""
    return self_tested(
        KernelName.SAMPLING,
        lambda: SamplingKernel(vocabulary, dtype, kernel),
        lambda made: _why_not(made, vocabulary, dtype) or _why_not(made, vocabulary, mx.float32),
        instead="MLX's operations sample (some thirty of them a step)",
    )


_TRIED = (
    (Sampling(), 1),
    (Sampling(temperature=1.0, top_k=1), 1),
    (Sampling(temperature=0.7, top_k=3), 3),
    (Sampling(temperature=1.0, top_p=0.001), 1),
    (Sampling(temperature=1.0, min_p=0.9), 1),
    (Sampling(temperature=0.01), 1),
    (Sampling(temperature=9.0, top_p=0.99, top_k=4), 4),
)
"""Parameters, and the number of best tokens that they allow, where each logit is 4 below the previous one."""


def _why_not(kernel: SamplingKernel, vocabulary: int, dtype: Any) -> str:
    """Return what is wrong with the tokens that `kernel` samples for rows whose best tokens are known; empty if nothing
    is."""
    best = [vocabulary // 2, vocabulary - 1, 0, vocabulary // 4]
    logits = np.full(vocabulary, -40.0, np.float32)
    logits[best] = [8.0, 4.0, 0.0, -4.0]
    batch = mx.array(np.tile(logits, (len(_TRIED), 1))).astype(dtype)
    rows = [SamplingRow(Submit(id="", prompt=(0,), max_tokens=1, sampling=one), (), vocabulary) for one, _ in _TRIED]
    for position in range(4):
        tokens, redrawn = draw(batch, rows, [position] * len(rows), kernel).resolve()
        if redrawn:
            return "it flagged a row of four tokens"
        for (sampling, may), token in zip(_TRIED, tokens, strict=True):
            if token not in best[:may]:
                return f"it sampled token {token} for {sampling}, and not one of {best[:may]}"
    return ""
