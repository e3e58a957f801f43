"""Log-probabilities of raw logits in float32, for the rows that request them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...core.messages import TokenLogprob
from ..device.staging import Put, direct
from .sampler import SamplingRow
from .vocab_ops import log_sum_exp, top_indices


class PromptScores:
    """Log-probabilities of a prompt's tokens: of `targets` (n,) under `logits` (n, V), with `count` alternatives each.
    Evaluate `arrays`, then `read`."""

    def __init__(self, logits: Any, targets: Sequence[int], count: int, put: Put = direct) -> None:
        self._count = count
        logits = logits.astype(mx.float32)
        total = log_sum_exp(logits)
        chosen = mx.take_along_axis(logits, put(np.array(targets, np.int32))[0][:, None], axis=-1) - total
        best = top_indices(logits, min(max(count, 1), logits.shape[-1]))
        self.arrays = [chosen[:, 0], best, mx.take_along_axis(logits, best, axis=-1) - total]

    def read(self) -> tuple[TokenLogprob, ...]:
        """Return one for each target."""
        chosen, best, values = (array.tolist() for array in self.arrays)
        return tuple(
            TokenLogprob(logprob=c, top=tuple(zip(b[: self._count], v[: self._count], strict=True)))
            for c, b, v in zip(chosen, best, values, strict=True)
        )


class Logprobs:
    """Log-probabilities of the tokens (B,) sampled from `logits` (B, V). Evaluate `arrays`, then `read`."""

    def __init__(self, logits: Any, tokens: Any, rows: Sequence[SamplingRow], put: Put = direct) -> None:
        self._requested = {i: row.logprobs for i, row in enumerate(rows) if row.logprobs is not None}
        self.arrays: list[Any] = []
        if not self._requested:
            return
        places = put(np.array(list(self._requested), np.int32))[0]
        logits = logits[places].astype(mx.float32)
        total = log_sum_exp(logits)
        chosen = mx.take_along_axis(logits, tokens[places][:, None], axis=-1) - total
        most = min(max(self._requested.values()), logits.shape[-1])
        best = top_indices(logits, max(most, 1))
        self.arrays = [chosen[:, 0], best, mx.take_along_axis(logits, best, axis=-1) - total]

    def read(self) -> dict[int, TokenLogprob]:
        """Return one for each row that requested it, by its place in the batch."""
        if not self._requested:
            return {}
        chosen, best, values = (array.tolist() for array in self.arrays)
        return {
            place: TokenLogprob(logprob=chosen[i], top=tuple(zip(best[i][:count], values[i][:count], strict=True)))
            for i, (place, count) in enumerate(self._requested.items())
        }
