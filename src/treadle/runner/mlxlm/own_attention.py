"""Attention of mlx-lm's modules that compute it in ways of their own, as calls of caches that attend themselves.

Modules that stay as they are: deepseek_v41 keeps more than keys and values, olmo fails on prompts in mlx-lm, too, and
those of `_WRONG` have no right logits to be held to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import chosen
from .fetched import FETCHED
from .heads import heads_of, lines_of
from .hooks import Window
from .recurrent import mixed_heads


def route(module: Any) -> bool:
    """Let a cache with `attend` compute the attention of `module`. Returns whether it does, now or since before. Raises
    NotImplementedError where mlx-lm computes it wrongly."""
    kind = type(module)
    if hasattr(kind, "routes"):
        return bool(kind.routes)
    name = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    if name in _WRONG:
        raise NotImplementedError(_WRONG[name])
    if name in _MODELS:
        module.__class__ = _with_positions(kind, _MODELS[name])
    if name not in _CALLS:
        return False
    module.__class__ = _routed(kind, _CALLS[name])
    return True


def _routed(kind: Any, attended: Callable[..., Any]) -> type:
    """Return the class `kind` with attention by `attended` where the cache computes it. Its call takes hidden states
    first, a mask, and the cache, a list of caches, or the keys that another layer's returned."""
    signature = inspect.signature(kind.__call__)
    _, first, *names = signature.parameters
    masks = next(name for name in names if name.endswith("mask"))

    def call(self: Any, *args: Any, **named: Any) -> Any:
        given = signature.bind(self, *args, **named).arguments
        cache, mask = given.get("cache"), given.get(masks)
        if "keys" in given:
            cache = FETCHED.cache_of(given["keys"])
        if not any(hasattr(one, "attend") for one in (cache if isinstance(cache, list) else [cache])):
            return kind.__call__(self, *args, **named)
        if mask is not None and not isinstance(mask, Window):
            raise NotImplementedError("the model makes a mask of its own")
        return attended(self, given[first], mask.size if mask is not None else 0, cache)

    return _like(kind, call, attends=True)


def _with_positions(kind: Any, computed: Callable[..., Any]) -> type:
    """Return the class `kind` of a model that reads its cache's offset as one number, with a pass by `computed` where
    each token has a position of its own."""

    def call(self: Any, inputs: Any, cache: Any = None) -> Any:
        if cache is None or not hasattr(cache[0], "attend"):
            return kind.__call__(self, inputs, cache)
        return computed(self, inputs, cache)

    return _like(kind, call, attends=False)


def _like(kind: Any, call: Callable[..., Any], *, attends: bool) -> type:
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "routes": attends})


def _gemma2(self: Any, x: Any, window: int, cache: Any) -> Any:
    """Gemma 2, with scores that are capped. mlx-lm's own call fails for a batch with a mask."""
    queries = heads_of(self.q_proj(x), self.n_heads)
    keys, values = heads_of(self.k_proj(x), self.n_kv_heads), heads_of(self.v_proj(x), self.n_kv_heads)
    queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, values)
    cap = float(self.attn_logit_softcapping)
    return self.o_proj(lines_of(cache.attend(queries, keys, values, self.scale, window, None, softcap=cap)))


def _plamo2(self: Any, x: Any, window: int, cache: Any) -> Any:
    """PLaMo 2, whose queries and keys are normed and weighted by the head."""
    queries, keys, values = mx.split(self.qkv_proj(x), [self.q_proj_dim, self.q_proj_dim + self.k_proj_dim], axis=-1)
    queries, keys = heads_of(queries, self.q_num_heads), heads_of(keys, self.k_num_heads)
    queries = mx.fast.rms_norm(queries, weight=None, eps=1e-6) * self.q_weight[:, None]
    keys = mx.fast.rms_norm(keys, weight=None, eps=1e-6) * self.k_weight[:, None]
    queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, heads_of(values, self.v_num_heads))
    return self.o_proj(lines_of(cache.attend(queries, keys, values, self.scale, window, None)))


def _stablelm(self: Any, x: Any, window: int, cache: Any) -> Any:
    """StableLM. mlx-lm's own call casts the keys that it got from the cache to float32, as kernels do themselves."""
    queries, keys = (
        proj(x).reshape(*x.shape[:2], heads, -1)
        for proj, heads in ((self.q_proj, self.num_heads), (self.k_proj, self.num_key_value_heads))
    )
    if self.qk_layernorm:
        queries, keys = self.q_layernorm(queries), self.k_layernorm(keys)
    queries, keys = (self.rope(one.transpose(0, 2, 1, 3), offset=cache.offset) for one in (queries, keys))
    keys, values = cache.update_and_fetch(keys, heads_of(self.v_proj(x), self.num_key_value_heads))
    return self.o_proj(lines_of(cache.attend(queries, keys, values, self.head_dim**-0.5, window, None)))


def _plamo(self: Any, x: Any, window: int, cache: Any) -> Any:
    """PLaMo, whose kv heads are shared by query heads that are not side by side: those of number h, h + the number of
    kv heads, and so on."""
    queries, keys = heads_of(self.q_proj(x), self.q_num_heads), heads_of(self.k_proj(x), self.k_num_heads)
    queries, keys = self.rotary_emb(queries, offset=cache.offset), self.rotary_emb(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, heads_of(self.v_proj(x), self.v_num_heads))
    queries = mx.unflatten(queries, 1, (-1, self.k_num_heads)).swapaxes(1, 2).flatten(1, 2)
    out = cache.attend(queries, keys, values, self.scale, window, None)
    return self.o_proj(lines_of(mx.unflatten(out, 1, (self.k_num_heads, -1)).swapaxes(1, 2).flatten(1, 2)))


def _afm7(self: Any, x: Any, window: int, cache: Any) -> Any:
    """AFM 7, in layers that share an earlier one's keys and values. mlx-lm's own call takes their number for the
    position."""
    queries = self.q_norm(self.rope(heads_of(self.q_proj(x), self.n_heads), offset=cache.offset))
    return self.out_proj(lines_of(cache.attend(queries, *FETCHED.of(cache), self.scale, window, None)))


def _baichuan_m1(self: Any, x: Any, window: int, cache: Any) -> Any:
    """Baichuan M1, whose keys and values are mixed with those of the token before, from a recurrent layer's slots."""
    before, own = cache
    widths = [self.hidden_size, self.hidden_size + self.num_kv_heads * self.head_dim]
    queries, *mixed = mx.split(self.W_pack(x), widths, axis=-1)
    mixed = [mix(one, before[i]) for i, (mix, one) in enumerate(zip(mixed_heads(self), mixed, strict=True))]
    keys, values = (heads_of(one, self.num_kv_heads) for one in mixed)
    queries, keys = self.rope(heads_of(queries, self.num_heads), offset=own.offset), self.rope(keys, offset=own.offset)
    keys, values = own.update_and_fetch(keys, values)
    return self.o_proj(lines_of(own.attend(queries, keys, values, self.scale, window, None)))


def _gpt_bigcode(self: Any, inputs: Any, cache: Any) -> Any:
    """GPT BigCode, with learned embeddings of positions."""
    x = self.wte(inputs) + self.wpe(cache[0].offset[:, None])
    for layer, own in zip(self.h, cache, strict=True):
        x = layer(x, None, cache=own)
    return self.ln_f(x)


def _llama4(self: Any, x: Any, window: int, cache: Any) -> Any:
    """Llama 4, whose layers that see all tokens have no rotation, and queries that grow with the position."""
    queries, keys = heads_of(self.q_proj(x), self.n_heads), heads_of(self.k_proj(x), self.n_kv_heads)
    if self.use_rope:
        queries, keys = self.rope(queries, offset=cache.offset), self.rope(keys, offset=cache.offset)
    elif self.attn_temperature_tuning:
        factors = mx.log(mx.floor((cache.offset + 1) / self.floor_scale) + 1) * self.attn_scale + 1
        queries = (queries * factors[:, None, None, None]).astype(queries.dtype)
    if self.use_qk_norm:
        queries, keys = (mx.fast.rms_norm(one, weight=None, eps=1e-6) for one in (queries, keys))
    keys, values = cache.update_and_fetch(keys, heads_of(self.v_proj(x), self.n_kv_heads))
    return self.o_proj(lines_of(cache.attend(queries, keys, values, self.scale, window, None)))


def _llama4_model(self: Any, inputs: Any, cache: Any) -> Any:
    """Llama 4. mlx-lm's own pass makes a mask of chunks from one position."""
    x = self.embed_tokens(inputs)
    for layer, own in zip(self.layers, cache, strict=True):
        x = layer(x, None, cache=own)
    return self.norm(x)


_CALLS = {
    "afm7.KVReuseAttention": _afm7,
    "baichuan_m1.Attention": _baichuan_m1,
    "deepseek_v32.DeepseekV32Attention": chosen.deepseek_v32,
    "gemma2.Attention": _gemma2,
    "llama4.Attention": _llama4,
    "minimax_m3_vl.Attention": chosen.minimax_m3,
    "plamo.Attention": _plamo,
    "plamo2.Attention": _plamo2,
    "stablelm.Attention": _stablelm,
}
"""Attention, by module and class."""
_MODELS = {"gpt_bigcode.GPTBigCodeModel": _gpt_bigcode, "llama4.LlamaModel": _llama4_model}
"""Models, by module and class."""
_WRONG = {"phi3small.Attention": "mlx-lm lets the tokens of its prompts see those behind them"}
"""Reasons against attention that mlx-lm computes wrongly, by module and class: its masks are added as numbers."""
