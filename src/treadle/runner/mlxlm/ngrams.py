"""Embeddings of a token with those before it (LongCat Flash, 2025), for tokens of many sequences side by side.

mlx-lm's module keeps the last tokens in a cache. In slots they are a convolution's last inputs: each of its channels
picks the token of one distance.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

_NAME = ("mlx_lm.models.longcat_flash_ngram", "NgramEmbedding")


class TokensBefore:
    """The `count` tokens before each one, from slots. Numbers of tokens are exact in float32."""

    dtype = mx.float32

    def __init__(self, count: int) -> None:
        self.weight = mx.contiguous(mx.pad(mx.eye(count)[:, ::-1], [(0, 0), (0, 1)])[..., None])
        mx.eval(self.weight)
        self._slots: Any = None

    def bind(self, slots: Any) -> None:
        """Read from `slots` from now on."""
        self._slots = slots

    def of(self, tokens: Any) -> Any:
        """Tokens (T, 1, count) before `tokens` (T, 1), the nearest first, 0 where there is none."""
        assert self._slots is not None
        inputs = mx.broadcast_to(tokens[..., None].astype(self.dtype), (*tokens.shape, self.weight.shape[0]))
        return self._slots.convolve(inputs, self.weight, None).astype(tokens.dtype)


def tokens_before(model: Any) -> list[TokensBefore]:
    """The tokens that embeddings of `model` look back to, for each module of such; routes these modules to slots."""
    return [_routed(module) for module in model.modules() if (type(module).__module__, type(module).__name__) == _NAME]


def _routed(module: Any) -> TokensBefore:
    if not hasattr(type(module), "embeds_slots"):
        module.__class__ = _in_slots(type(module))
    made: TokensBefore = vars(module).setdefault("tokens_before", TokensBefore(module.n - 1))
    return made


def _in_slots(kind: Any) -> type:
    def call(self: Any, tokens: Any, cache: Any = None) -> Any:
        if not hasattr(cache, "entries"):
            return kind.__call__(self, tokens, cache)
        _ = cache[0]  # binds the slots
        tokens = tokens.astype(mx.int64)
        before = self.tokens_before.of(tokens)
        shifted = {place: before[..., place - 2] for place in range(2, self.n + 1)}
        x = self.word_embeddings(tokens)
        for index, (embed, project) in enumerate(zip(self.embedders, self.post_projs, strict=True)):
            length, which = index // self.k + 2, index % self.k
            numbers = self._get_ngram_ids(tokens, shifted, self._vocab_mods[length, which], ngram=length)
            x = x + project(embed(numbers % (self.m + index * 2 + 1)))
        return x / (1 + len(self.embedders))

    members = {"__call__": call, "__module__": kind.__module__, "embeds_slots": True}
    return type(kind.__name__, (kind,), members)
