"""Ends of the fused decoder: the embedding of tokens, and the output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .families import Family
from .kernels import LayerKernels, Table
from .merged_linear import Tools, merge_linears, quantized_linear
from .quantization import Quantization


def embedding_lookup(module: Any, kernels: LayerKernels, scale: float) -> Callable[[Any], Any]:
    """Embedding lookup of tokens (T,) into (T, W), times `scale`: MLX's own takes one thread for a whole row of the
    table."""
    if type(module) is nn.Embedding and module.weight.shape[1] % 8 == 0:
        weight = module.weight
        table = Table(weight, weight, weight, weight.shape[1])
    elif type(module) is nn.QuantizedEmbedding and module.mode == "affine" and module.bits in (4, 8):
        columns = module.weight.shape[1] * 32 // module.bits
        table = Table(module.weight, module.scales, module.biases, columns, module.bits, module.group_size)
    elif scale == 1:
        embed: Callable[[Any], Any] = module
        return embed
    else:
        return lambda tokens: module(tokens) * scale
    scaled = replace(table, scale=rounded(scale, table.scales.dtype))
    return lambda tokens: kernels.embed(tokens, scaled)


def rounded(factor: float, dtype: Any) -> float:
    """The factor as MLX rounds it."""
    rounded: Any = mx.array(factor, dtype).item()
    return float(rounded)


def output_head(model: Any, family: Family, embedding: Any, tools: Tools) -> Callable[[Any], Any]:
    """Logits (N, V) of hidden states (N, W)."""
    head, scale, cap = (
        _head_product(model, family, embedding, tools),
        family.logit_scale(model),
        family.logit_cap(model),
    )
    if scale == 1 and not cap:
        return head

    def logits(y: Any) -> Any:
        found = head(y) if scale == 1 else head(y) * scale
        return mx.tanh(found / cap) * cap if cap else found

    return logits


def _head_product(model: Any, family: Family, embedding: Any, tools: Tools) -> Callable[[Any], Any]:
    made: Callable[[Any], Any]
    if family.head in model:
        head = getattr(model, family.head)
        try:
            return merge_linears([head], tools, head=True)
        except NotImplementedError:
            return lambda y: head(y)
    if type(embedding) is nn.QuantizedEmbedding:
        way = Quantization.of(embedding)
        parts = embedding.weight, embedding.scales, embedding.get("biases")
        return quantized_linear(*parts, None, way, tools, head=True)
    made = embedding.as_linear
    return made
