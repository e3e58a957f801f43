"""A model in memory with what the runner must know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from . import mlxlm
from .memory import KvCost
from .mlxlm import Caches, MlxLm


@dataclass(frozen=True)
class LoadedModel:
    """`batched` says whether rows may share one forward pass; otherwise each decodes with its own caches.
    `shares_prefill` says whether several prompts may."""

    name: str
    module: Any
    library: MlxLm
    architecture: str
    vocabulary: int
    context: int
    device: str
    dtype: str
    parameters: int
    weight_bytes: int
    kv: KvCost
    kv_budget_bytes: int
    batched: bool
    shares_prefill: bool
    details: dict[str, str] = field(default_factory=dict)

    def new_caches(self) -> Caches:
        """Empty caches for one row."""
        return self.library.new_caches(self.module)

    def prefill(self, tokens: Sequence[int], caches: Caches) -> None:
        """Put `tokens` behind what the caches of one row hold. Only caches are evaluated: no logits are computed."""
        self.module(mx.array([list(tokens)], mx.int32), cache=caches)
        mx.eval(mlxlm.states(caches))

    def decode(self, tokens: Sequence[int], caches: Caches) -> Any:
        """Logits (B, V), not evaluated, of one more token a row."""
        logits = self.module(mx.array(list(tokens), mx.int32)[:, None], cache=caches)
        return logits[:, -1, :]
