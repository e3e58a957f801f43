"""Embeddings that take the place of tokens' own in a pass, as those of images, and what first layers get added.

Features stand for what a model's embedding returns: where the model multiplies that by a factor, as Gemma does, they
are multiplied too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .called_as import called_as

_DECODERS = ("model", "transformer", "backbone")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embeddings", "embedding", "embed_in")


@dataclass(frozen=True)
class Injection:
    """The embeddings `rows` (T, D) of those tokens of a pass that have (T, 1) them; and for each of the first layers,
    (T, D) that is added to what the layer returns (DeepStack; Meng et al., 2024)."""

    have: Any
    rows: Any
    deepstack: Sequence[Any] = field(default=())

    @property
    def arrays(self) -> list[Any]:
        return [self.have, self.rows, *self.deepstack]

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> Injection | None:
        """The inverse of `arrays`; None where there are none."""
        return cls(arrays[0], arrays[1], arrays[2:]) if arrays else None

    def into(self, embeddings: Any, scale: float = 1.0) -> Any:
        """Embeddings (T, D) or (T, 1, D), times `scale` already, with those of the tokens that have others."""
        rows = self.rows if scale == 1 else self.rows.astype(mx.float32) * scale
        shape, dtype = embeddings.shape, embeddings.dtype
        return mx.where(self.have, rows.astype(dtype), embeddings.reshape(rows.shape)).reshape(shape)

    def behind(self, layer: int, x: Any) -> Any:
        """`x` (T, D) or (T, 1, D) as returned by a layer, one of the first, with what is added to it."""
        return x + self.deepstack[layer].astype(x.dtype).reshape(x.shape)


@contextmanager
def injecting(model: Any, injection: Injection) -> Iterator[None]:
    """Let mlx-lm's `model` compute passes over single tokens with an `injection` inside the block."""
    layers = model.layers[: len(injection.deepstack)]
    assert len(layers) < len(model.layers), "the last layer may be computed for some tokens only"
    calls = [(embedding_of(model), partial(_embedded, injection))]
    calls += [(layer, partial(_behind, injection, number)) for number, layer in enumerate(layers)]
    with called_as(calls):
        yield


def _embedded(injection: Injection, own: Any, tokens: Any) -> Any:
    return injection.into(own(tokens))


def _behind(injection: Injection, number: int, own: Any, *args: Any, **named: Any) -> Any:
    return injection.behind(number, own(*args, **named))


def embedding_of(model: Any) -> Any | None:
    """The embedding of tokens of mlx-lm's `model`; None where its name is not known."""
    text = text_model(model)
    for decoder in (getattr(text, name, None) for name in _DECODERS):
        decoder = decoder if decoder is None else text_model(decoder)
        for name in _EMBEDDINGS:
            found = getattr(decoder, name, None)
            if isinstance(found, nn.Module):
                return found
    return None


def text_model(model: Any) -> Any:
    """The text model inside `model`."""
    while isinstance(inner := getattr(model, "language_model", None), nn.Module):
        model = inner
    return model
