"""Decoder with fused layers, over pages, for Llama, Mistral, Qwen 2 and Qwen 3.

It is made from mlx-lm's module: weights that are used together are concatenated once (q, k and v; gate and up), and the
module's own layers become views of them, so that nothing is held twice and the module still works. It is used only
where a self-test gave the module's own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..kv.paged.kernels import Kernels
from ..kv.paged.layer import PagedLayer
from ..kv.paged.paged_pass import PagedPass
from ..mlxlm import Selection
from .kernels import Heads, LayerKernels, Table
from .merged_linear import MergedLinear, Tools, merge_linears

_MODULES = ("mlx_lm.models.llama", "mlx_lm.models.qwen2", "mlx_lm.models.qwen3")


@dataclass(frozen=True)
class _Layer:
    """Weights and constants of a layer; `inv_freq` (D / 2,) are radians a position."""

    norm: Any
    eps: float
    qkv: MergedLinear
    q_norm: Any | None
    k_norm: Any | None
    qk_eps: float
    inv_freq: Any
    scale: float
    heads: Heads
    out: MergedLinear
    second_norm: Any
    gate_up: MergedLinear
    down: MergedLinear

    @property
    def products(self) -> tuple[MergedLinear, ...]:
        """The layer's matrix products."""
        return self.qkv, self.out, self.gate_up, self.down


class FusedDecoder:
    """Computes `module`'s passes over pages that `kernels` read, with `selection` before its head. Raises
    NotImplementedError for other architectures."""

    def __init__(self, module: Any, kernels: Kernels, selection: Selection | None) -> None:
        if type(module).__module__ not in _MODULES:
            raise NotImplementedError(f"there is no fused decoder for {type(module).__module__}")
        if selection is None:
            raise NotImplementedError("its last norm is not known")
        inner = module.model
        self._compile = kernels.compile
        self._layer_kernels = LayerKernels(kernels.kernel)
        self._embed = _embedding(inner.embed_tokens, self._layer_kernels)
        self._selection = selection
        norm = getattr(inner.norm, "norm", inner.norm)
        self._norm = norm.weight
        tools = Tools.of(kernels.kernel, _bytes(inner.layers[0]), kernels.dtype)
        self._layers = _shared_frequencies([_layer(layer, kernels.page, tools) for layer in inner.layers])
        self._inv_freq = {id(layer.inv_freq): layer.inv_freq for layer in self._layers}
        self._first_eps = inner.layers[0].input_layernorm.eps
        tied = bool(module.args.tie_word_embeddings)
        self._head = inner.embed_tokens.as_linear if tied else merge_linears([module.lm_head], tools, head=True)
        self.product_kernels = tools.statuses([product for layer in self._layers for product in layer.products])

    def __call__(self, tokens: Any, cache: Sequence[PagedLayer]) -> Any:
        """Logits (N, 1, V) of the selected `tokens` (T, 1)."""
        step, rows = cache[0].step, self._selection.rows
        kinds = {layer.kind for layer in cache}
        shapes, arrays = step.inputs(kinds)
        quantized = cache[0].pool.scales is not None
        if quantized and step.decode_tokens < step.count:  # memory that grows can't be a part of a program
            logits, states = self._pass(tokens, rows, step, cache)
            return self._kept(logits, states, cache[-1])
        key = (shapes, None if rows is None else rows.shape)
        program = step.compiled.get(key, lambda: self._compile(self._program(cache, step.template(kinds))))
        logits, states = program(tokens, rows, arrays)
        return self._kept(logits, states, cache[-1])

    def _kept(self, logits: Any, states: Any, last: PagedLayer) -> Any:
        """Return `logits`. The hidden `states` (T, D) of all tokens show when keys and values are written."""
        last.written = states
        if self._selection.keep is not None:
            self._selection.states.append(states[self._selection.keep])
        return logits

    def _program(self, cache: Sequence[PagedLayer], template: PagedPass) -> Callable[..., Any]:
        """The pass as a function of its arrays, to be compiled: that takes a tenth of the host's time. Passes come in
        few shapes, also of arrays that grow with the sequences' lengths."""

        def program(tokens: Any, rows: Any | None, arrays: Sequence[Any]) -> tuple[Any, Any]:
            return self._pass(tokens, rows, template.filled(arrays), cache)

        return program

    def _pass(self, tokens: Any, rows: Any | None, step: PagedPass, cache: Sequence[PagedLayer]) -> tuple[Any, Any]:
        """Logits of the tokens at `rows`, or of all, and the hidden states (T, D) of all tokens, computed from all keys
        and values."""
        kernels, layers = self._layer_kernels, self._layers
        x = self._embed(tokens.reshape(-1))
        y = mx.fast.rms_norm(x, layers[0].norm, self._first_eps)
        cos_sin = {key: kernels.cos_sin(step.positions, inv_freq) for key, inv_freq in self._inv_freq.items()}
        norms = [*(layer.norm for layer in layers[1:]), self._norm]
        for layer, pages, norm in zip(layers, cache, norms, strict=True):
            turned, slots = cos_sin[id(layer.inv_freq)], step.tables[pages.kind.table].slots
            queries = kernels.rotate(
                layer.qkv(y), layer.q_norm, layer.k_norm, layer.qk_eps, turned, slots, pages.pool, layer.heads
            )
            attended = pages.attention(step, queries, slots, layer.scale)
            x, y = kernels.add_norm(x, layer.out(attended.reshape(x.shape[0], -1)), layer.second_norm, layer.eps)
            y = kernels.swiglu(layer.gate_up(y))
            x, y = kernels.add_norm(x, layer.down(y), norm, layer.eps)
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
    if dim % 64:
        raise NotImplementedError(f"heads of {dim} dimensions")
    return _Layer(
        norm=norm.weight,
        eps=float(norm.eps),
        qkv=qkv,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        qk_eps=float(norm.eps if q_norm is None else q_norm.eps),
        inv_freq=_inv_freq(attention.rope, dim),
        scale=float(attention.scale),
        heads=Heads(queries, kv, dim, page),
        out=product(attention.o_proj),
        second_norm=second.weight,
        gate_up=product(mlp.gate_proj, mlp.up_proj),
        down=product(mlp.down_proj),
    )


def _bytes(layer: Any) -> int:
    """Bytes of the layer's parameters."""
    return sum(array.nbytes for _, array in tree_flatten(layer.parameters()))


def _shared_frequencies(layers: list[_Layer]) -> list[_Layer]:
    """The layers, with one `inv_freq` array for all that are equal."""
    known: list[Any] = []
    shared = []
    for layer in layers:
        inv_freq = next((one for one in known if mx.array_equal(layer.inv_freq, one).item()), None)
        if inv_freq is None:
            inv_freq = layer.inv_freq
            known.append(inv_freq)
        shared.append(replace(layer, inv_freq=inv_freq))
    return shared


def _embedding(module: Any, kernels: LayerKernels) -> Callable[[Any], Any]:
    """Embedding lookup of tokens (T,) into (T, W): MLX's own takes one thread for a whole row of the table."""
    if type(module) is nn.Embedding and module.weight.shape[1] % 8 == 0:
        weight = module.weight
        table = Table(weight, weight, weight, weight.shape[1])
    elif type(module) is nn.QuantizedEmbedding and module.mode == "affine" and module.bits in (4, 8):
        columns = module.weight.shape[1] * 32 // module.bits
        table = Table(module.weight, module.scales, module.biases, columns, module.bits, module.group_size)
    else:
        embed: Callable[[Any], Any] = module
        return embed
    return lambda tokens: kernels.embed(tokens, table)


def _inv_freq(rope: Any, dim: int) -> Any:
    """Inverse frequencies (D / 2,), float32: the rotation of each pair of dimensions a position, in radians."""
    if type(rope) is nn.RoPE and not rope.traditional and rope.dims == dim:
        exponents = mx.arange(0, dim, 2, dtype=mx.float32) / dim
        return rope.scale * mx.power(mx.array(rope.base, mx.float32), -exponents)
    if type(rope).__name__ == "Llama3RoPE" and not rope.traditional and rope.dims == dim:
        return 1.0 / rope._freqs.astype(mx.float32)
    raise NotImplementedError(f"positions by {type(rope).__name__}")
