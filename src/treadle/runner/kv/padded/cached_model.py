"""A model over mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ... import mlxlm
from ...forward.segments import RowSegment
from ...mlxlm import Caches, MlxLm, Selection


@dataclass(frozen=True)
class CachedModel:
    """`module` with mlx-lm's caches. The lengths of prompts' passes are multiples of `pad_to`; `selection` keeps hidden
    states. `evaluate` waits for the passes of prompts, or only begins them."""

    module: Any
    library: MlxLm
    pad_to: int = 1
    selection: Selection | None = None
    evaluate: Callable[..., None] = mx.eval

    def new_caches(self) -> Caches:
        """Empty caches for one sequence."""
        return self.library.new_caches(self.module)

    def prefill(self, tokens: Sequence[int], caches: Caches) -> None:
        """Append `tokens` to the caches of one sequence. Only caches are evaluated: no logits are computed."""
        extra = -len(tokens) % self.pad_to
        if extra and not mlxlm.can_trim(caches):
            extra = 0
        self.module(mx.array([[*tokens, *[0] * extra]], mx.int32), cache=caches)
        if extra:
            mlxlm.trim(caches, extra)
        self.evaluate(mlxlm.states(caches))

    def hidden(self, tokens: Sequence[int], caches: Caches, count: int) -> Any:
        """Append `tokens` to the caches of one sequence; hidden states (count, D) of the last ones."""
        assert self.selection is not None, "the model's last norm is known"
        with mlxlm.keeping(self.selection, mx.arange(len(tokens) - count, len(tokens))):
            self.prefill(tokens, caches)
        states = self.selection.take()
        self.evaluate(states)
        return states

    def score(self, tokens: Sequence[int], caches: Caches) -> Any:
        """Append `tokens` to the caches of one sequence; logits (n, V) of all of them."""
        logits = self.module(mx.array([list(tokens)], mx.int32), cache=caches)[0]
        self.evaluate([logits, mlxlm.states(caches)])
        return logits

    def decode(self, tokens: Any, caches: Caches) -> Any:
        """Append one token a sequence, `tokens` (B,) int32, to batched caches; logits (B, V), not evaluated."""
        return self.module(tokens[:, None], cache=caches)[:, -1, :]


def last_tokens(segments: Sequence[RowSegment], previous: Any | None) -> Any:
    """The last tokens (B,) int32 of `segments`. Those that are not known yet are in `previous`."""
    sources = [segment.previous for segment in segments]
    if previous is None or max(sources) < 0:
        return mx.array([segment.tokens[-1] for segment in segments], mx.int32)
    if sources == list(range(len(sources))):
        return previous if len(sources) == previous.shape[0] else previous[: len(sources)]
    fed = previous[mx.array(np.maximum(sources, 0))]
    if min(sources) >= 0:
        return fed
    known = mx.array([segment.tokens[-1] for segment in segments], mx.int32)
    return mx.where(mx.array([source >= 0 for source in sources]), fed, known)
