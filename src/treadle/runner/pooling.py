"""Pooling of hidden states: one vector for a sequence whose prompt is computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..core.messages import Pooling

Activation = Callable[[Any], Any]


def _identity(vector: Any) -> Any:
    return vector


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling: `weight` (outputs, inputs), maybe `bias` (outputs,), and an activation function."""

    weight: Any
    bias: Any | None = None
    activation: Activation = _identity

    def __call__(self, vector: Any) -> Any:
        product = self.weight @ vector
        return self.activation(product if self.bias is None else product + self.bias)


@dataclass(frozen=True)
class Embedding:
    """Vectors of a model: `dimensions` numbers each, by one of `poolings`, the model's own first, and through the
    layers of `dense`. `only`: the model generates no text. `whole`: the last chunk of a prompt gives the states of all
    its tokens, and those before it none. `unavailable` is the reason where it gives no vectors."""

    dimensions: int = 0
    poolings: tuple[Pooling, ...] = tuple(Pooling)
    dense: Sequence[Dense] = ()
    only: bool = False
    whole: bool = False
    unavailable: str = ""

    def pool(self, pooling: Pooling | None, tokens: int) -> RowPool | None:
        """Return the pool of a new sequence with a prompt of so many tokens; None for one without pooling. Raises
        ValueError for a pooling that the model does not have."""
        if pooling is None:
            return None
        if self.unavailable:
            raise ValueError(f"this model gives no embeddings: {self.unavailable}")
        if pooling not in self.poolings:
            raise ValueError(f"this model's embeddings are pooled by {self.poolings[0].value}, not {pooling.value}")
        return RowPool(pooling, tokens, self.dense, self.whole)


@dataclass(slots=True)
class RowPool:
    """The pooled hidden states of one sequence with a prompt of `tokens` tokens, on the device.

    For a mean, `sums` has the sum of the first n tokens' states at n: for the last two chunks, as the last one may be
    computed again. `whole` is that of `Embedding`.
    """

    pooling: Pooling
    tokens: int
    dense: Sequence[Dense] = ()
    whole: bool = False
    sums: dict[int, Any] = field(default_factory=dict)

    def needed(self, start: int, end: int) -> int:
        """Return how many hidden states, the last ones, are needed of the tokens from `start` to `end`."""
        if self.pooling is Pooling.LAST:
            return int(end == self.tokens)
        if self.whole:
            return self.tokens if end == self.tokens else 0
        return end - start if self.pooling is Pooling.MEAN or start == 0 else 0

    def add(self, start: int, end: int, states: Any | None) -> tuple[Any | None, Any | None]:
        """Add the needed `states` (n, D) of the tokens from `start` to `end`. Return the pooled vector, once the prompt
        is complete, and the array to evaluate with this step; each may be None."""
        kept = self.sums.get(start) if states is None else self._summed(start, states.astype(mx.float32))
        if kept is None:
            return None, None
        self.sums = {count: kept_before for count, kept_before in self.sums.items() if count == start} | {end: kept}
        if end < self.tokens:
            return None, kept
        vector = kept / self.tokens if self.pooling is Pooling.MEAN else kept
        for layer in self.dense:
            vector = layer(vector)
        return vector, vector

    def _summed(self, start: int, states: Any) -> Any:
        if self.pooling is Pooling.LAST:
            return states[-1]
        if self.pooling is Pooling.CLS:
            return states[0]
        total = states.sum(axis=0)
        return total if start == 0 or self.whole else self.sums[start] + total
