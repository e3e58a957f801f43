"""Attention of mlx-lm's modules that compute it without the shared function, as calls of caches that attend themselves.

Modules that stay as they are: phi3small sees a pattern of blocks, deepseek_v41 keeps more than keys and values, and
olmo fails on prompts in mlx-lm, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .hooks import Window


def route(module: Any) -> bool:
    """Let a cache with `attend` compute the attention of `module`. Returns whether it does, now or since before."""
    kind = type(module)
    if hasattr(kind, "routes"):
        return True
    call = _CALLS.get(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
    if call is None:
        return False
    module.__class__ = _routed(kind, call)
    return True


def _routed(kind: Any, attended: Callable[..., Any]) -> type:
    """Return the class `kind` with attention by `attended` where the cache computes it. Its call takes hidden states,
    a mask and the cache, in this order, under names that differ."""

    def bind(self: Any, x: Any = None, mask: Any = None, cache: Any = None, hidden_states: Any = None) -> Any:
        return x if hidden_states is None else hidden_states, mask, cache

    def call(self: Any, *args: Any, **named: Any) -> Any:
        x, mask, cache = bind(self, *args, **named)
        if not hasattr(cache, "attend"):
            return kind.__call__(self, x, mask, cache)
        if mask is not None and not isinstance(mask, Window):
            raise NotImplementedError("the model makes a mask of its own")
        return attended(self, x, mask.size if mask is not None else 0, cache)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "routes": True})


def _gemma2(self: Any, x: Any, window: int, cache: Any) -> Any:
    """Gemma 2, with scores that are capped. mlx-lm's own call fails for a batch with a mask."""
    queries = _heads(self.q_proj(x), self.n_heads)
    keys, values = _heads(self.k_proj(x), self.n_kv_heads), _heads(self.v_proj(x), self.n_kv_heads)
    queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, values)
    cap = float(self.attn_logit_softcapping)
    return self.o_proj(_lines(cache.attend(queries, keys, values, self.scale, window, None, softcap=cap)))


def _plamo2(self: Any, x: Any, window: int, cache: Any) -> Any:
    """PLaMo 2, whose queries and keys are normed and weighted by the head."""
    queries, keys, values = mx.split(self.qkv_proj(x), [self.q_proj_dim, self.q_proj_dim + self.k_proj_dim], axis=-1)
    queries, keys = _heads(queries, self.q_num_heads), _heads(keys, self.k_num_heads)
    queries = mx.fast.rms_norm(queries, weight=None, eps=1e-6) * self.q_weight[:, None]
    keys = mx.fast.rms_norm(keys, weight=None, eps=1e-6) * self.k_weight[:, None]
    queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, _heads(values, self.v_num_heads))
    return self.o_proj(_lines(cache.attend(queries, keys, values, self.scale, window, None)))


def _heads(x: Any, heads: int) -> Any:
    """(B, L, heads * D) as (B, heads, L, D)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _lines(x: Any) -> Any:
    """(B, heads, L, D) as (B, L, heads * D)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


_CALLS = {"gemma2.Attention": _gemma2, "plamo2.Attention": _plamo2}
"""By module and class."""
