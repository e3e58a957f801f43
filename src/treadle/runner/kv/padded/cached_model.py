"""A model over mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ... import mlxlm
from ...mlxlm import Caches, MlxLm, Selection


@dataclass(frozen=True)
class CachedModel:
    """`module` with mlx-lm's caches. The lengths of prompts' passes are multiples of `pad_to`; `selection` keeps hidden
    states."""

    module: Any
    library: MlxLm
    pad_to: int = 1
    selection: Selection | None = None

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
        mx.eval(mlxlm.states(caches))

    def hidden(self, tokens: Sequence[int], caches: Caches, count: int) -> Any:
        """Append `tokens` to the caches of one sequence; hidden states (count, D) of the last ones, evaluated."""
        assert self.selection is not None, "the model's last norm is known"
        with mlxlm.keeping(self.selection, mx.arange(len(tokens) - count, len(tokens))):
            self.prefill(tokens, caches)
        states = self.selection.take()
        mx.eval(states)
        return states

    def score(self, tokens: Sequence[int], caches: Caches) -> Any:
        """Append `tokens` to the caches of one sequence; logits (n, V) of all of them, evaluated."""
        logits = self.module(mx.array([list(tokens)], mx.int32), cache=caches)[0]
        mx.eval(logits, mlxlm.states(caches))
        return logits

    def decode(self, tokens: Sequence[int], caches: Caches) -> Any:
        """Append one token a sequence (B,) to batched caches; logits (B, V), not evaluated."""
        logits = self.module(mx.array(list(tokens), mx.int32)[:, None], cache=caches)
        return logits[:, -1, :]
