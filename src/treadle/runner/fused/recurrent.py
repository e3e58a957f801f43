"""Recurrent mixers by kernels: one product for all projections, and nothing of it copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kv.paged.kernels import Kernels
from ..recurrent.layer import RecurrentLayer
from ..recurrent.mixing import Mixing
from .delta_facts import DeltaFacts
from .families import Family
from .head_product import HeadProduct
from .layer import FusedPass, JoinedLinear, Part, check_parts
from .merged_linear import MergedLinear, Tools, concatenated
from .mixer_kernels import Gate
from .norms import Norm
from .quantization import Quantization

_EPSILON = 1e-6
"""Of mlx-lm's `normalize_qk`."""


@dataclass(frozen=True)
class FusedDelta:
    """A mixer with a gated delta rule, as `facts` describe it. `low_rank` makes decays and gates where `inputs` do
    not."""

    facts: DeltaFacts
    inputs: JoinedLinear
    mixing: Mixing
    low_rank: HeadProduct | None
    gate: Gate
    out: JoinedLinear
    own_modules: Sequence[Any] = ()
    part: Part = Part.DELTA_RULE

    @classmethod
    def of(cls, module: Any, family: Family, kernels: Kernels | None, tools: Tools) -> FusedDelta:
        """The mixer of a module. Raises NotImplementedError where a part of it is not known."""
        if family.delta is None or kernels is not None:
            raise NotImplementedError("a mixer without a gated delta rule")
        facts = family.delta(module)
        if not (norm := Norm.of(facts.norm, tools.dtype)).known:
            raise NotImplementedError(f"heads normalized by {type(facts.norm).__name__}")
        inputs = JoinedLinear.of(facts.inputs, tools)
        low_rank = _side_by_side(facts, tools) if facts.low_rank else None
        mixing = Mixing.of(facts.columns, facts.convolutions, silu=True)
        gate = Gate(mx.array(np.asarray(facts.places, np.int32)), facts.silu, norm)
        mx.eval(gate.places, facts.a_log, facts.dt_bias)
        return cls(facts, inputs, mixing, low_rank, gate, JoinedLinear.of([_way_out(module)], tools))

    @property
    def products(self) -> Sequence[MergedLinear]:
        return [*self.inputs.products, *self.out.products]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        layer: RecurrentLayer = cache
        facts, tokens, gates = self.facts, y.shape[0], self.inputs(y)
        keys, heads = facts.groups * facts.dim, facts.heads
        mixed = layer.mix(gates, self.mixing)
        ends = np.cumsum([keys, keys, heads * facts.value_dim, heads]).tolist()
        q, k, v, b, a = mx.split(mixed, ends, axis=-1)
        q, k = (one.reshape(tokens, 1, facts.groups, facts.dim) for one in (q, k))
        v = v.reshape(tokens, 1, heads, facts.value_dim)
        if self.low_rank is not None:
            both = self.low_rank(gates, facts.low_first, self.low_rank.columns)
            a, gates = both[:, None, 0].reshape(tokens, 1, heads, facts.dim), both.reshape(tokens, -1)
        norm = facts.dim**-0.5, _EPSILON
        out = layer.recurrence.gated_delta(q, k, v, a, b, facts.a_log, facts.dt_bias, norm=norm)
        return self.out(computed.mixers.gate_heads(out.reshape(tokens, -1), self.gate, gates, facts.value_dim))


@dataclass(frozen=True)
class FusedShortConvolution:
    """LFM2's mixer: a convolution between two gates."""

    inputs: JoinedLinear
    mixing: Mixing
    out: JoinedLinear
    own_modules: Sequence[Any] = ()
    part: Part = Part.SHORT_CONVOLUTION

    @classmethod
    def of(cls, module: Any, family: Family, kernels: Kernels | None, tools: Tools) -> FusedShortConvolution:
        """The mixer of a module. Raises NotImplementedError where a part of it is not known."""
        if kernels is not None or not {"conv", "in_proj", "out_proj"} <= set(module.children()):
            raise NotImplementedError("a mixer that is no short convolution")
        check_parts(module, {"conv", "in_proj", "out_proj"})
        inputs, width = JoinedLinear.of([module.in_proj], tools), int(module.conv.weight.shape[0])
        if inputs.outputs != 3 * width:
            raise NotImplementedError(f"a short convolution of {width} out of {inputs.outputs} channels")
        mixing = Mixing.of(range(2 * width, 3 * width), [module.conv], gates=(0, width))
        return cls(inputs, mixing, JoinedLinear.of([module.out_proj], tools))

    @property
    def products(self) -> Sequence[MergedLinear]:
        return [*self.inputs.products, *self.out.products]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        layer: RecurrentLayer = cache
        return self.out(layer.mix(self.inputs(y), self.mixing)[:, 0])


def _side_by_side(facts: DeltaFacts, tools: Tools) -> HeadProduct:
    """The product of two layers of low ranks, whose inputs lie side by side, as that of two heads."""
    layers = facts.low_rank
    kinds = {type(layer) for layer in layers}
    quantized = kinds == {nn.QuantizedLinear}
    ways = {Quantization.of(layer) for layer in layers} if quantized else {None}
    if (not quantized and kinds != {nn.Linear}) or len(ways) > 1 or any("bias" in layer for layer in layers):
        raise NotImplementedError("gates by layers of different kinds")

    def part(name: str) -> Any | None:
        whole = concatenated(layers, name)
        return None if whole is None else whole.reshape(len(layers), -1, whole.shape[-1])

    return HeadProduct(part("weight"), part("scales"), part("biases"), ways.pop(), tools.kernel, tools.dtype)


def _way_out(module: Any) -> Any:
    return module.out_proj if "out_proj" in module else module.o_proj
