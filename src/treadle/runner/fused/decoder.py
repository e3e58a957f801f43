"""A decoder of the plain kind (Llama, Mistral, Qwen 2 and 3) with its kernels fused, over pages.

Made from mlx-lm's module and its weights: what belongs together is put side by side once (q, k and v; gate and up), and
the module's own layers become views of it, so nothing is held twice and the module still works. It is used where
trying it gave the module's own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..mlxlm import Selection
from ..paged.kernels import Kernels
from ..paged.layer import PagedLayer, Pass
from ..paged.work import Tiles
from .kernels import Between, Heads, constant
from .product import Product, joined

_MODULES = ("mlx_lm.models.llama", "mlx_lm.models.qwen2", "mlx_lm.models.qwen3")


@dataclass(frozen=True)
class _Layer:
    """A layer's parts; `turns` (D / 2,) are radians a position."""

    norm: Any
    eps: Any
    qkv: Product
    q_norm: Any | None
    k_norm: Any | None
    qk_eps: Any
    turns: Any
    scale: float
    heads: Heads
    out: Product
    second_norm: Any
    gate_up: Product
    down: Product


class FusedDecoder:
    """Stands for `module` in a pass over pages that `kernels` read, with `selection` before its head. Raises
    NotImplementedError where the module is not of the plain kind."""

    def __init__(self, module: Any, kernels: Kernels, selection: Selection | None) -> None:
        if type(module).__module__ not in _MODULES:
            raise NotImplementedError(f"{type(module).__module__} is not a decoder of the plain kind")
        if selection is None:
            raise NotImplementedError("its last norm is not known")
        inner = module.model
        self._embed = inner.embed_tokens
        self._selection = selection
        norm = getattr(inner.norm, "norm", inner.norm)
        self._norm, self._eps = norm.weight, constant(norm.eps)
        self._between = Between(kernels.kernel)
        self._layers = [_layer(layer, kernels) for layer in inner.layers]
        self._first_eps = inner.layers[0].input_layernorm.eps
        tied = bool(module.args.tie_word_embeddings)
        self._head = inner.embed_tokens.as_linear if tied else joined([module.lm_head], kernels.kernel)

    def __call__(self, tokens: Any, cache: Sequence[PagedLayer]) -> Any:
        """Logits (N, 1, V) of the selected ones of `tokens` (T, 1)."""
        step, rows = cache[0].step, self._selection.rows
        if rows is None and step.few == tokens.shape[0] and len({pages.window for pages in cache}) == 1:
            return self._decode(tokens, cache, step)

        def attend(pages: PagedLayer, queries: Any, scale: float) -> Any:
            return pages.attend_written(queries, scale)

        return self._logits(tokens, cache, step, attend, rows)

    def _decode(self, tokens: Any, cache: Sequence[PagedLayer], step: Pass) -> Any:
        """A pass of rows that decode is the same program again and again: compiled once for each number of rows, it
        takes a tenth of the time to put together. What grows with the rows' lengths comes in a few sizes."""
        kernels, window = cache[0].kernels, cache[0].window
        tiles = step.work(few=True, rep=kernels.rep, heads=kernels.heads, window=window)
        if tiles.rows not in step.compiled:
            step.compiled[tiles.rows] = kernels.compile(self._program(cache, step.counters[True], tiles))
        logits = step.compiled[tiles.rows](tokens, step.positions, step.slots, step.pages, tiles.items)
        cache[-1].written = logits  # all keys and values are, once it is computed
        return logits

    def _program(self, cache: Sequence[PagedLayer], counters: Any, like: Tiles) -> Callable[..., Any]:
        def program(tokens: Any, positions: Any, slots: Any, pages: Any, items: Any) -> Any:
            tiles = replace(like, items=items)

            def attend(layer: PagedLayer, queries: Any, scale: float) -> Any:
                return layer.kernels.attend(
                    queries, layer.pool, tiles, pages, counters, slots, scale=scale, window=layer.window
                )

            return self._logits(tokens, cache, Pass(positions=positions, slots=slots), attend, None)

        return program

    def _logits(
        self, tokens: Any, cache: Sequence[PagedLayer], step: Pass, attend: Callable[..., Any], rows: Any | None
    ) -> Any:
        between = self._between
        x = self._embed(tokens[:, 0])
        y = mx.fast.rms_norm(x, self._layers[0].norm, self._first_eps)
        for i, (layer, pages) in enumerate(zip(self._layers, cache, strict=True)):
            queries = between.rotate(
                layer.qkv(y), layer.q_norm, layer.k_norm, layer.qk_eps, layer.turns, step, pages.pool, layer.heads
            )
            attended = attend(pages, queries, layer.scale)
            x, y = between.add_norm(x, layer.out(attended.reshape(x.shape[0], -1)), layer.second_norm, layer.eps)
            after = self._layers[i + 1].norm if i + 1 < len(self._layers) else self._norm
            x, y = between.add_norm(x, layer.down(between.swiglu(layer.gate_up(y))), after, layer.eps)
        return self._head(y if rows is None else y[rows])[:, None]


def _layer(layer: Any, kernels: Kernels) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    queries, kv = attention.n_heads, attention.n_kv_heads
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    norm, second = layer.input_layernorm, layer.post_attention_layernorm
    qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], kernels.kernel)
    dim = qkv.outputs // (queries + 2 * kv)
    return _Layer(
        norm=norm.weight,
        eps=constant(norm.eps),
        qkv=qkv,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        qk_eps=constant(norm.eps if q_norm is None else q_norm.eps),
        turns=_turns(attention.rope, dim),
        scale=float(attention.scale),
        heads=Heads(queries, kv, dim, kernels.page),
        out=joined([attention.o_proj], kernels.kernel),
        second_norm=second.weight,
        gate_up=joined([mlp.gate_proj, mlp.up_proj], kernels.kernel),
        down=joined([mlp.down_proj], kernels.kernel),
    )


def _turns(rope: Any, dim: int) -> Any:
    """Radians by which each pair of dimensions turns from one position to the next (D / 2,), float32."""
    if type(rope) is nn.RoPE and not rope.traditional and rope.dims == dim:
        exponents = mx.arange(0, dim, 2, dtype=mx.float32) / dim
        return rope.scale * mx.power(mx.array(rope.base, mx.float32), -exponents)
    if type(rope).__name__ == "Llama3RoPE" and not rope.traditional and rope.dims == dim:
        return 1.0 / rope._freqs.astype(mx.float32)
    raise NotImplementedError(f"positions by {type(rope).__name__}")
