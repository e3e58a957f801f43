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
from mlx.utils import tree_flatten

from ..kv.paged.kernels import Kernels
from ..kv.paged.layer import PagedLayer, Pass
from ..mlxlm import Selection
from .kernels import Heads, LayerKernels, Table
from .merged_linear import MergedLinear, Tools, merge_linears

_MODULES = ("mlx_lm.models.llama", "mlx_lm.models.qwen2", "mlx_lm.models.qwen3")


@dataclass(frozen=True)
class _Layer:
    """A layer's parts; `turns` (D / 2,) are radians a position."""

    norm: Any
    eps: float
    qkv: MergedLinear
    q_norm: Any | None
    k_norm: Any | None
    qk_eps: float
    turns: Any
    scale: float
    heads: Heads
    out: MergedLinear
    second_norm: Any
    gate_up: MergedLinear
    down: MergedLinear


class FusedDecoder:
    """Stands for `module` in a pass over pages that `kernels` read, with `selection` before its head. Raises
    NotImplementedError where the module is not of the plain kind."""

    def __init__(self, module: Any, kernels: Kernels, selection: Selection | None) -> None:
        if type(module).__module__ not in _MODULES:
            raise NotImplementedError(f"{type(module).__module__} is not a decoder of the plain kind")
        if selection is None:
            raise NotImplementedError("its last norm is not known")
        inner = module.model
        self._between = LayerKernels(kernels.kernel)
        self._embed = _embedding(inner.embed_tokens, self._between)
        self._selection = selection
        norm = getattr(inner.norm, "norm", inner.norm)
        self._norm = norm.weight
        tools = Tools.of(kernels.kernel, _bytes(inner.layers[0]))
        self._layers = _alike([_layer(layer, kernels.page, tools) for layer in inner.layers])
        self._turns = {id(layer.turns): layer.turns for layer in self._layers}
        self._first_eps = inner.layers[0].input_layernorm.eps
        tied = bool(module.args.tie_word_embeddings)
        self._head = inner.embed_tokens.as_linear if tied else merge_linears([module.lm_head], tools, head=True)

    def __call__(self, tokens: Any, cache: Sequence[PagedLayer]) -> Any:
        """Logits (N, 1, V) of the selected ones of `tokens` (T, 1)."""
        step, rows = cache[0].step, self._selection.rows
        windows = sorted({layer.window for layer in cache})
        shapes, arrays = step.inputs(windows)
        if step.few < step.count and cache[0].pool.scales is not None:  # memory that grows would be a part of it
            logits, cache[-1].written = self._pass(tokens, rows, step, cache)
            return logits
        key = (shapes, None if rows is None else rows.shape)
        program = step.compiled.get(key, lambda: step.kernels.compile(self._program(cache, step.template(windows))))
        logits, cache[-1].written = program(tokens, rows, arrays)
        return logits

    def _program(self, cache: Sequence[PagedLayer], template: Pass) -> Callable[..., Any]:
        """A pass that comes again with other arrays is the same program: compiled, it takes a tenth of the time to put
        together. Passes come in few sizes, and so does what grows with the rows' lengths."""

        def program(tokens: Any, rows: Any | None, arrays: Sequence[Any]) -> tuple[Any, Any]:
            return self._pass(tokens, rows, template.filled(arrays), cache)

        return program

    def _pass(self, tokens: Any, rows: Any | None, step: Pass, cache: Sequence[PagedLayer]) -> tuple[Any, Any]:
        """Logits of the tokens at `rows`, or of all, and what is there when all keys and values are written."""
        between, layers = self._between, self._layers
        x = self._embed(tokens.reshape(-1))
        y = mx.fast.rms_norm(x, layers[0].norm, self._first_eps)
        angles = {key: between.angles(step.positions, turns) for key, turns in self._turns.items()}
        norms = [*(layer.norm for layer in layers[1:]), self._norm]
        for layer, pages, norm in zip(layers, cache, norms, strict=True):
            turned = angles[id(layer.turns)]
            queries = between.rotate(
                layer.qkv(y), layer.q_norm, layer.k_norm, layer.qk_eps, turned, step.slots, pages.pool, layer.heads
            )
            attended = step.attend(queries, pages.pool, step.slots, window=pages.window, scale=layer.scale)
            x, y = between.add_norm(x, layer.out(attended.reshape(x.shape[0], -1)), layer.second_norm, layer.eps)
            y = between.swiglu(layer.gate_up(y))
            x, y = between.add_norm(x, layer.down(y), norm, layer.eps)
        return self._head(y if rows is None else y[rows])[:, None], y


def _layer(layer: Any, page: int, tools: Tools) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    queries, kv = attention.n_heads, attention.n_kv_heads
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    norm, second = layer.input_layernorm, layer.post_attention_layernorm

    def product(*some: Any) -> MergedLinear:
        return merge_linears(some, tools)

    qkv = product(attention.q_proj, attention.k_proj, attention.v_proj)
    dim = qkv.outputs // (queries + 2 * kv)
    return _Layer(
        norm=norm.weight,
        eps=float(norm.eps),
        qkv=qkv,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        qk_eps=float(norm.eps if q_norm is None else q_norm.eps),
        turns=_turns(attention.rope, dim),
        scale=float(attention.scale),
        heads=Heads(queries, kv, dim, page),
        out=product(attention.o_proj),
        second_norm=second.weight,
        gate_up=product(mlp.gate_proj, mlp.up_proj),
        down=product(mlp.down_proj),
    )


def _bytes(layer: Any) -> int:
    """Of the layer's parameters."""
    return sum(array.nbytes for _, array in tree_flatten(layer.parameters()))


def _alike(layers: list[_Layer]) -> list[_Layer]:
    """The layers, with the same `turns` where they are equal."""
    known: list[Any] = []
    shared = []
    for layer in layers:
        turns = next((one for one in known if mx.array_equal(layer.turns, one).item()), None)
        if turns is None:
            turns = layer.turns
            known.append(turns)
        shared.append(replace(layer, turns=turns))
    return shared


def _embedding(module: Any, between: LayerKernels) -> Callable[[Any], Any]:
    """What makes vectors (T, W) of tokens (T,): MLX's own takes a thread for a whole line of the table."""
    if type(module) is nn.Embedding and module.weight.shape[1] % 8 == 0:
        weight = module.weight
        table = Table(weight, weight, weight, weight.shape[1])
    elif type(module) is nn.QuantizedEmbedding and module.mode == "affine" and module.bits in (4, 8):
        columns = module.weight.shape[1] * 32 // module.bits
        table = Table(module.weight, module.scales, module.biases, columns, module.bits, module.group_size)
    else:
        embed: Callable[[Any], Any] = module
        return embed
    return lambda tokens: between.embed(tokens, table)


def _turns(rope: Any, dim: int) -> Any:
    """Radians by which each pair of dimensions turns from one position to the next (D / 2,), float32."""
    if type(rope) is nn.RoPE and not rope.traditional and rope.dims == dim:
        exponents = mx.arange(0, dim, 2, dtype=mx.float32) / dim
        return rope.scale * mx.power(mx.array(rope.base, mx.float32), -exponents)
    if type(rope).__name__ == "Llama3RoPE" and not rope.traditional and rope.dims == dim:
        return 1.0 / rope._freqs.astype(mx.float32)
    raise NotImplementedError(f"positions by {type(rope).__name__}")
