"""Pooling of hidden states to vectors, and what a runner can do of it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Pooling(StrEnum):
    """Ways to make one vector of the hidden states of a prompt's tokens."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # their mean
    CLS = "cls"  # the first token's


class EmbeddingCapabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """Embeddings of a model: vectors of `dimensions` numbers, by one of `poolings`, the model's own first. `only`: the
    model generates no text. `unavailable` is the reason where there are none, else empty."""

    dimensions: int = 0
    poolings: tuple[Pooling, ...] = ()
    only: bool = False
    unavailable: str = ""
