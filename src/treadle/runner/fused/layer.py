"""Branches of a decoder layer, attention and MLP: fused where their parts are known, and else mlx-lm's own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import mlx.core as mx

from ..kv.paged.kernels import Kernels
from ..kv.paged.layer import PagedLayer
from ..kv.paged.paged_pass import PagedPass
from .families import Family, part
from .kernels import Activation, HeadNorms, Heads, LayerKernels, Weighted
from .merged_linear import MergedLinear, Tools, side_by_side
from .mixer_kernels import Gate, MixerKernels
from .mixture_kernels import UNIT, Choice, MixtureKernels, Score
from .norms import Norm
from .rotary import Rotary


@dataclass(frozen=True)
class FusedPass:
    """One pass: its `step`, the `kernels` between products, cosines and sines by the `id` of their rotation, and
    factors of queries (T, 1, 1, 1), if any."""

    step: PagedPass
    kernels: LayerKernels
    mixers: MixerKernels
    cos_sin: Mapping[int, Any]
    query_scale: Any | None = None

    def turns(self, rotary: Rotary | None) -> Any | None:
        """Cosines and sines of a rotation; None where there is none."""
        return None if rotary is None else self.cos_sin[id(rotary)]


class Part(StrEnum):
    """A part of layers with kernels of its own, which can be left to the model's own module."""

    GATED_ATTENTION = "gated attention"
    LATENT_ATTENTION = "latent attention"
    DELTA_RULE = "gated delta rule"
    SHORT_CONVOLUTION = "short convolution"


class Branch(Protocol):
    """A branch of a layer: attention or another mixer, or an MLP. Its `products` are fused; `own_modules` are parts
    that mlx-lm computes."""

    @property
    def products(self) -> Sequence[MergedLinear]: ...

    @property
    def own_modules(self) -> Sequence[Any]: ...

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        """The branch (T, W), maybe a weighted sum, for its normalized input `y` (T, W), where `x` (T, W) is the
        residual stream. `cache` is the layer's own."""


@dataclass(frozen=True)
class JoinedLinear:
    """Linear layers of one input, side by side: as few products as their kinds allow."""

    products: Sequence[MergedLinear]

    @classmethod
    def of(cls, layers: Sequence[Any], tools: Tools) -> JoinedLinear:
        """The product of linear layers. Raises NotImplementedError for other kinds of layers."""
        return cls(side_by_side(layers, tools))

    @property
    def outputs(self) -> int:
        return sum(product.outputs for product in self.products)

    def __call__(self, x: Any) -> Any:
        """(T, N) of `x` (T, K)."""
        found = [product(x) for product in self.products]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)


@dataclass(frozen=True)
class FusedAttention:
    """Attention by kernels: products, norms and rotation of heads, pages."""

    qkv: JoinedLinear
    out: JoinedLinear
    heads: Heads
    norms: HeadNorms
    rotary: Rotary | None
    scale: float
    sinks: Any | None = None
    gate: Gate | None = None
    own_modules: Sequence[Any] = ()

    @classmethod
    def of(cls, module: Any, family: Family, kernels: Kernels | None, tools: Tools) -> FusedAttention:
        """The attention of a module. Raises NotImplementedError where a part of it is not known."""
        if not family.projections or kernels is None:
            raise NotImplementedError("the order of queries, keys and values")
        shared = bool(getattr(module, "use_k_eq_v", False))
        projections = family.projections[:2] if shared else family.projections
        check_parts(module, {*projections, family.output, *family.head_norms, "rope", "v_norm", "sinks"})
        if kernels.latent or kernels.value_dim != kernels.dim:
            raise NotImplementedError("values of other dimensions than keys")
        heads = Heads(
            kernels.heads * kernels.rep, kernels.heads, kernels.dim, kernels.page, shared, family.gated_attention
        )
        if heads.dim % 16:
            raise NotImplementedError(f"heads of {heads.dim} dimensions")
        norms = _head_norms(module, family, heads, kernels.dtype)
        rotary = Rotary.of(module.rope) if family.rotates(module) else None
        if rotary is not None and rotary.dims > heads.dim:
            raise NotImplementedError(f"{rotary.dims} rotated dimensions of {heads.dim}")
        qkv = JoinedLinear.of([getattr(module, name) for name in projections], tools)
        if qkv.outputs != heads.stored * heads.dim or (heads.gated and norms.whole):
            raise NotImplementedError(f"{qkv.outputs} dimensions of queries, keys and values")
        scale = float(getattr(module, "scale", heads.dim**-0.5))
        out = JoinedLinear.of([getattr(module, family.output)], tools)
        return cls(qkv, out, heads, norms, rotary, scale, module.get("sinks"), _head_gate(heads))

    @property
    def part(self) -> Part | None:
        return None if self.gate is None else Part.GATED_ATTENTION

    @property
    def products(self) -> Sequence[MergedLinear]:
        return [*self.qkv.products, *self.out.products]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        pages: PagedLayer = cache
        step, rotary = computed.step, self.rotary
        slots = step.tables[pages.kind.table].slots
        cos_sin, qkv = computed.turns(rotary), self.qkv(y)
        interleaved = rotary is not None and rotary.interleaved
        queries = computed.kernels.rotate(
            qkv, self.norms, cos_sin, slots, pages.pool, self.heads, interleaved=interleaved
        )
        if computed.query_scale is not None:
            queries = queries * computed.query_scale
        attended = pages.attention(step, queries, slots, self.scale, self.sinks)
        attended = attended.reshape(y.shape[0], -1)
        if self.gate is not None:
            attended = computed.mixers.gate_heads(attended, self.gate, qkv, self.heads.dim)
        return self.out(attended)


@dataclass(frozen=True)
class OwnMixer:
    """Attention, or a recurrent mixer, by mlx-lm's `module`."""

    module: Any
    products: Sequence[MergedLinear] = ()

    @property
    def own_modules(self) -> Sequence[Any]:
        return [self.module]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        if isinstance(cache, PagedLayer):
            cache = PagedLayer(cache.kind, cache.kernels, cache.pool, computed.step)
        return self.module(y[:, None], mask=None, cache=cache)[:, 0]


@dataclass(frozen=True)
class FusedMlp:
    """An MLP by kernels."""

    inputs: JoinedLinear
    down: JoinedLinear
    activation: Activation
    gated: bool
    own_modules: Sequence[Any] = ()

    @classmethod
    def of(cls, module: Any, family: Family, tools: Tools, names: Sequence[str] = ()) -> FusedMlp:
        """The MLP of a module, whose inputs and way down have other `names` than the family's, if any. Raises
        NotImplementedError where a part of it is not known, as with experts."""
        names = names or (*family.inputs, family.down)
        check_parts(module, set(names))
        layers = [module.get(name) for name in names]
        if None in layers:
            raise NotImplementedError(f"an MLP without {', '.join(names)}")
        inputs, down = JoinedLinear.of(layers[:-1], tools), JoinedLinear.of(layers[-1:], tools)
        if inputs.outputs % (16 if family.gated else 8):
            raise NotImplementedError(f"an MLP with {inputs.outputs} inner dimensions")
        return cls(inputs, down, family.activation, family.gated)

    @property
    def products(self) -> Sequence[MergedLinear]:
        return [*self.inputs.products, *self.down.products]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        return self.down(computed.kernels.activate(self.inputs(y), self.activation, gated=self.gated))


@dataclass(frozen=True)
class OwnMlp:
    """An MLP, or a mixture of experts, by mlx-lm's `module`. The outputs of experts with faster methods are not added
    up."""

    module: Any
    products: Sequence[MergedLinear] = ()

    @property
    def own_modules(self) -> Sequence[Any]:
        return [self.module]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        apart = getattr(getattr(self.module, "faster_call", None), "apart", None)
        weighted = None if apart is None else apart(y)
        return self.module(y[:, None])[:, 0] if weighted is None else Weighted(*weighted)


@dataclass(frozen=True)
class Experts:
    """Gemma 4's experts beside its MLP. They see the residual stream by two `norms`: of their router, and of their
    own."""

    layer: Any
    norms: tuple[Norm, Norm]
    choice: Choice
    kernels: MixtureKernels
    products: Sequence[MergedLinear] = ()

    @classmethod
    def of(cls, layer: Any, tools: Tools, dtype: Any) -> Experts:
        """Read the mixture of a layer. Raises NotImplementedError for one that the kernels don't take."""
        router = layer.router
        scale = (router.scale * router._root_size).astype(dtype)
        mx.eval(scale)
        choice = Choice(router.config.top_k_experts, Score.CHOSEN_SOFTMAX, scales=router.per_expert_scale)
        experts, outputs = router.per_expert_scale.size, layer.experts.switch_glu.down_proj.weight.shape[1]
        if not choice.takes(experts) or outputs % UNIT:
            raise NotImplementedError(f"{choice.top} of {experts} experts with {outputs} outputs")
        norms = Norm(router, scale, eps=float(router.eps)), Norm.of(layer.pre_feedforward_layernorm_2, dtype)
        return cls(layer, norms, choice, MixtureKernels(tools.kernel))

    @property
    def own_modules(self) -> Sequence[Any]:
        return [self.layer.router, self.layer.experts]

    def __call__(self, y: Any, x: Any, cache: Any, computed: FusedPass) -> Any:
        """As of all branches, with both normalized inputs in `y`."""
        of_router, own = y
        experts = self.layer.experts.switch_glu
        logits = self.layer.router.proj(of_router[:, None])[:, 0]
        chosen_by = getattr(getattr(experts, "faster_call", None), "chosen", None)
        if chosen_by is not None:
            return Weighted(*chosen_by(own, logits, self.choice))
        chosen, weights = self.kernels.choose(logits, self.choice)
        return Weighted(experts(own[:, None], chosen[:, None])[:, 0], weights)


def check_parts(module: Any, known: set[str]) -> None:
    """Raises NotImplementedError where a module has parts or weights of other names than the `known` ones."""
    found = {name for name, value in module.items() if isinstance(value, mx.array) or name in module.children()}
    if others := sorted(found - known):
        raise NotImplementedError(f"{type(module).__name__} with {', '.join(others)}")


def _head_gate(heads: Heads) -> Gate | None:
    """Gates of attention's outputs, each behind its head's query."""
    if not heads.gated:
        return None
    places = mx.arange(heads.queries, dtype=mx.int32) * (2 * heads.dim) + heads.dim
    mx.eval(places)  # not in each pass
    return Gate(places)


def _head_norms(module: Any, family: Family, heads: Heads, dtype: Any) -> HeadNorms:
    values = "v_norm" in module
    if family.head_norms[0] not in module:
        return HeadNorms(values=values)
    queries, keys = (Norm.of(part(module, name), dtype) for name in family.head_norms)
    sizes = [0 if norm.weight is None else norm.weight.size for norm in (queries, keys)]
    whole = sizes == [heads.queries * heads.dim, heads.kv * heads.dim] and heads.queries > 1
    other = not whole and sizes != [heads.dim] * 2
    if other or queries.centered or keys.centered or queries.eps != keys.eps:
        raise NotImplementedError(f"heads normalized by {type(module[family.head_norms[0]]).__name__}")
    return HeadNorms(queries.weight, keys.weight, queries.eps, whole, values)
