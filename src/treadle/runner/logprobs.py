"""Log-probabilities for the rows that ask for them: of the raw logits, in float32, cut to the asked number here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..core.messages import TokenLogprob
from .sampling import SamplingRow
from .vocabulary import log_sum_exp, top_indices


class Logprobs:
    """Log-probabilities of the tokens (B,) picked from `logits` (B, V): evaluate `arrays`, then `read` them."""

    def __init__(self, logits: Any, tokens: Any, rows: Sequence[SamplingRow]) -> None:
        self._asked = {i: row.logprobs for i, row in enumerate(rows) if row.logprobs is not None}
        self.arrays: list[Any] = []
        if not self._asked:
            return
        places = mx.array(list(self._asked))
        logits = logits[places].astype(mx.float32)
        total = log_sum_exp(logits)
        chosen = mx.take_along_axis(logits, tokens[places][:, None], axis=-1) - total
        most = min(max(self._asked.values()), logits.shape[-1])
        best = top_indices(logits, max(most, 1))
        self.arrays = [chosen[:, 0], best, mx.take_along_axis(logits, best, axis=-1) - total]

    def read(self) -> dict[int, TokenLogprob]:
        """For each row (by its place in the batch) that asked."""
        if not self._asked:
            return {}
        chosen, best, values = (array.tolist() for array in self.arrays)
        return {
            place: TokenLogprob(logprob=chosen[i], top=tuple(zip(best[i][:count], values[i][:count], strict=True)))
            for i, (place, count) in enumerate(self._asked.items())
        }
