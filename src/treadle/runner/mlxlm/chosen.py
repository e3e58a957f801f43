"""Attention of mlx-lm's modules over a chosen part of the tokens, as calls of caches that attend themselves.

Such a module has a second cache with small keys, by which it scores all tokens, and attends to the best. That cache
gives each of the step's segments to the module's choice (`choices`), and the first one attends to what was chosen
(`attend_chosen`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from .heads import heads_of, lines_of


def deepseek_v32(self: Any, x: Any, window: int, cache: Any) -> Any:
    """DeepSeek Sparse Attention (DeepSeek-V3.2, 2025): the lightning indexer's best tokens, over latents."""
    latents, index = cache
    low_rank = self.q_a_layernorm(self.q_a_proj(x))
    queries, rotated = mx.split(heads_of(self.q_b_proj(low_rank), self.num_heads), [self.qk_nope_head_dim], axis=-1)
    latent, rotated_key = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
    rotated = self.rope(rotated, latents.offset) * self.scale
    rotated_key = self.rope(heads_of(rotated_key, 1), latents.offset)
    keys, _ = latents.update_and_fetch(self.kv_a_layernorm(latent)[:, None], rotated_key)
    chosen, queries = _tokens(self.indexer, x, low_rank, index), self.embed_q(queries)
    if chosen is None:
        out = latents.attend_latent(queries, rotated, keys, self.scale)
    else:
        out = latents.attend_chosen(queries, self.scale, chosen, rotated)
    return self.o_proj(lines_of(self.unembed_out(out)))


def _tokens(indexer: Any, x: Any, low_rank: Any, index: Any) -> Any:
    """The tokens that a DeepSeek `indexer` chooses, by its cache `index`."""
    queries = indexer.rope(heads_of(indexer.wq_b(low_rank), indexer.n_heads), offset=index.offset)
    keys = indexer.rope(heads_of(indexer.k_norm(indexer.wk(x)), 1), offset=index.offset)
    weights = heads_of(indexer.weights_proj(x) * (indexer.n_heads**-0.5 * indexer.softmax_scale), indexer.n_heads)
    index.update_and_fetch(keys, keys[..., :0])
    return index.choices(partial(_best_tokens, indexer.index_topk), queries, weights)


def _best_tokens(most: int, queries: Any, weights: Any, keys: Any) -> Any | None:
    """The `most` tokens of `keys` (1, 1, S, D) with the largest scores for each of the last n, which have `queries` (1,
    heads, n, D) and `weights` (1, heads, n, 1): indices (most,) where n is 1, else a mask (1, 1, n, S)."""
    count, seen = queries.shape[2], keys.shape[2]
    if seen <= most:
        return None
    scores: Any = 0
    for head in range(queries.shape[1]):  # one by one: the scores of all heads would be the largest array of a pass
        own = mx.maximum(queries[:, head] @ keys[:, 0].swapaxes(-1, -2), 0)
        scores = scores + own * weights[:, head]
    if count == 1:
        return mx.argpartition(scores[0, 0], kth=-most)[-most:]
    causal = _causal(count, seen)
    best = mx.argpartition(mx.where(causal, scores, -mx.inf), kth=-most, axis=-1)[..., -most:]
    chosen = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), best, mx.array(True), axis=-1)
    return (chosen & causal)[:, None]


def minimax_m3(self: Any, x: Any, window: int, cache: Any) -> Any:
    """MiniMax M3: blocks of tokens, chosen by their best one, and those around the token itself."""
    own, *index = cache
    queries = self.q_proj(x).reshape(*x.shape[:2], self.num_attention_heads, -1)
    keys = self.k_proj(x).reshape(*x.shape[:2], self.num_key_value_heads, -1)
    if self.use_qk_norm:
        queries, keys = self.q_norm(queries), self.k_norm(keys)
    queries, keys = (self.rope(one.transpose(0, 2, 1, 3), offset=own.offset) for one in (queries, keys))
    keys, values = own.update_and_fetch(keys, heads_of(self.v_proj(x), self.num_key_value_heads))
    chosen = _blocks(self, x, index[0]) if self.is_sparse_attn else None
    if chosen is None:
        return self.o_proj(lines_of(own.attend(queries, keys, values, self.scale, window, None)))
    return self.o_proj(lines_of(own.attend_chosen(queries, self.scale, chosen)))


def _blocks(module: Any, x: Any, index: Any) -> Any:
    """The blocks that a MiniMax attention `module` chooses, by its cache `index`."""
    queries = module.index_q_norm(module.index_q_proj(x).reshape(*x.shape[:2], module.index_n_heads, -1))
    keys = module.index_k_norm(module.index_k_proj(x)[:, :, None])
    queries, keys = (module.index_rope(one.transpose(0, 2, 1, 3), offset=index.offset) for one in (queries, keys))
    index.update_and_fetch(keys, keys[..., :0])
    return index.choices(partial(_best_blocks, module), queries)


def _best_blocks(module: Any, queries: Any, keys: Any) -> Any | None:
    """The blocks of `keys` (1, 1, S, D) for the last n tokens, which have `queries` (1, heads, n, D): a mask (1, query
    heads, n, S)."""
    size, most, count, seen = module.index_block_size, module.index_topk_blocks, queries.shape[2], keys.shape[2]
    blocks = -(-seen // size)
    if blocks <= most:
        return None
    causal = _causal(count, seen)
    scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = mx.pad(
        mx.where(causal, scores, -mx.inf), [(0, 0)] * 3 + [(0, blocks * size - seen)], constant_values=-mx.inf
    )
    scores = mx.unflatten(scores, -1, (blocks, size)).max(axis=-1)
    behind = mx.arange(seen - count, seen)[:, None] // size - mx.arange(blocks)
    scores = mx.where((behind >= 0) & (behind < module.index_local_blocks), mx.inf, scores)
    best = mx.argpartition(-scores, kth=most - 1, axis=-1)[..., :most]
    chosen = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), best, mx.array(True), axis=-1)
    chosen = mx.repeat(chosen, size, axis=-1)[..., :seen] & causal
    return mx.repeat(chosen, module.num_attention_heads // module.index_n_heads, axis=1)


def _causal(count: int, seen: int) -> Any:
    """Mask (count, seen) of the last `count` tokens over all `seen`."""
    return mx.arange(seen - count, seen)[:, None] >= mx.arange(seen)
