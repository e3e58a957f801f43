"""Decoder with fused layers, over pages, for the families of `families`.

It is made from mlx-lm's module: weights that are used together are concatenated once (q, k and v; gate and up), and the
module's own layers become views of them, so that nothing is held twice and the module still works. Mixers and MLPs
with unknown parts, and mixtures of experts, stay the module's own, between norms of ours. The decoder is used only
where a self-test gave the module's own logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...core.compute_path import KernelStatus
from ..kv.cache_layout import CacheKind, CacheLayout
from ..kv.layer_caches import LayerCaches
from ..kv.paged.kernels import Kernels
from ..kv.paged.layer import PagedLayer
from ..kv.paged.paged_pass import PagedPass
from ..kv.seen_queries import compiled_pass
from ..mlxlm import FETCHED, Injection, RotaryAxes, Selection
from .ends import embedding_lookup, output_head, rounded
from .families import Family, family_of, part
from .kernels import LayerKernels, Residual
from .latent import FusedLatentAttention
from .layer import Branch, Experts, FusedAttention, FusedMlp, FusedPass, OwnMixer, OwnMlp, Part
from .merged_linear import Tools
from .mixer_kernels import MixerKernels
from .norms import Norm
from .quantization import Quantization
from .recurrent import FusedDelta, FusedShortConvolution
from .rotary import Rotary
from .workspace import LaunchOrder

_OF_EXPERTS = 3
"""Dimensions of experts' weights."""
_MIXERS = (FusedAttention, FusedLatentAttention, FusedDelta, FusedShortConvolution)
_Mixer = FusedAttention | FusedLatentAttention | FusedDelta | FusedShortConvolution
EARLY = (1, 4, 12)
"""Layers behind which a pass may be handed to the device: MLX does so with every hundred launches, some nine layers,
and a device without other work waits for the first hundred."""


@dataclass(frozen=True)
class _Step:
    """A branch of a layer, of the residual stream by the norm `before`, and how it is added to that. `place` is the
    index of its cache among the model's, if it has one. A branch `beside` it is added with it: of the same input, or by
    norms of its own."""

    branch: Branch
    before: Norm | None
    added: Residual
    place: int | None = None
    beside: Branch | None = None
    norms: Sequence[Norm] = ()

    @property
    def branches(self) -> Sequence[Branch]:
        return [self.branch] if self.beside is None else [self.branch, self.beside]

    @property
    def more(self) -> Sequence[Norm]:
        """The norms that are computed with that before the branch."""
        before = self.before
        return self.norms if before is not None and all(map(before.alike, self.norms)) else ()

    def computed_beside(self, y: Any, x: Any, more: Sequence[Any], computed: FusedPass) -> Any | None:
        """The branch beside, for the input `y` of the other one, and what was computed with it by `more`."""
        if self.beside is None:
            return None
        own = more or [norm(x) for norm in self.norms] or [y]
        return self.beside(own[0] if len(own) == 1 else tuple(own), x, None, computed)


class FusedDecoder:
    """Computes `module`'s passes over pages that the `kernels` of its layers read, with `selection` before its head.

    Passes are traced within `traced`, where the model's own modules are to know of that. `layout` arranges the model's
    caches (None: each layer has one with pages). The parts `own` are left to the module. Raises NotImplementedError for
    other families.
    """

    def __init__(
        self,
        module: Any,
        kernels: Sequence[Kernels],
        selection: Selection | None,
        traced: Callable[[], AbstractContextManager[None]] = nullcontext,
        layout: CacheLayout | None = None,
        own: Collection[Part] = (),
    ) -> None:
        model, family = family_of(module)
        if selection is None:
            raise NotImplementedError("its last norm is not known")
        inner, dtype = part(model, family.decoder), kernels[0].dtype
        layers = part(inner, family.layers)
        caches = _caches(kernels, layout)
        if len(caches) != sum(map(family.cached, layers)):
            raise NotImplementedError("layers that share keys and values")
        self.family = type(model).__module__.rpartition(".")[2]
        self._compile = kernels[0].compile
        self._layer_kernels = LayerKernels(kernels[0].kernel)
        self._mixer_kernels = MixerKernels(kernels[0].kernel)
        self._traced = traced
        self._selection = selection
        embedding = part(inner, family.embedding)
        self._embedding_scale = rounded(family.embedding_scale(model), dtype)
        self._embed = embedding_lookup(embedding, self._layer_kernels, self._embedding_scale)
        self._axes = RotaryAxes.of(module)
        self._norm = Norm.of(part(inner, family.last_norm), dtype)
        tools = Tools.of(kernels[0].kernel, _product_bytes(layers), dtype)
        if family.parallel or _ways(layers) > 1:
            tools = replace(tools, order=LaunchOrder(dtype))
        self._order = tools.order
        reading = _Reading(model, family, tools, own)
        numbers = iter(range(len(caches)))
        places = [next(numbers) if family.cached(layer) else None for layer in layers]
        of_layers = [reading.steps(layer, caches, place) for layer, place in zip(layers, places, strict=True)]
        steps = [one for some in of_layers for one in some]
        self._steps = _shared_rotations(steps)
        self._ends = {id(self._steps[end - 1]): i for i, end in enumerate(accumulate(map(len, of_layers)), 1)}
        branches = [branch for step in self._steps for branch in step.branches]
        rotations = [branch.rotary for branch in branches if isinstance(branch, FusedAttention | FusedLatentAttention)]
        self._rotations = {id(one): one for one in rotations if one is not None}
        self._query_scale = None if family.query_scale is None else (model, family.query_scale)
        self._head = output_head(model, family, embedding, tools)
        parts = {branch.part for branch in branches if isinstance(branch, _MIXERS)}
        self.parts: set[Part] = {part for part in parts if part is not None}
        self.own_modules = [one for branch in branches for one in branch.own_modules]
        self.product_kernels: list[KernelStatus] = tools.statuses(
            [product for branch in branches for product in branch.products]
        )
        self._early = [layer for layer in EARLY if layer < len(layers)]
        self._caches: LayerCaches | None = None

    @property
    def own_parts(self) -> str:
        """The branches that mlx-lm's modules compute, with their number; empty where there are none."""
        names = Counter(type(module).__name__ for module in self.own_modules)
        return ", ".join(f"{count} {name}" for name, count in names.items())

    def __call__(self, tokens: Any, cache: Sequence[Any], injection: Injection | None = None) -> Any:
        """Logits (N, 1, V) of the selected `tokens` (T, 1), with the model's caches."""
        if self._caches is None or self._caches.arrangement is not cache:
            self._caches = LayerCaches.of(cache)
        caches = self._caches
        step, rows = caches.step, self._selection.rows
        kinds = {layer.kind for layer in caches.paged}
        shapes, arrays = step.inputs(kinds)
        quantized = caches.paged[0].pool.scales is not None
        if quantized and step.decode_tokens < step.count:  # memory that grows can't be a part of a program
            logits, *states = self._pass(tokens, rows, step, cache, injection)
            return self._kept(logits, states, caches.paged[-1])
        slots, injected = caches.slots, [] if injection is None else injection.arrays
        kind = None if rows is None else rows.shape, len(injected), step.seen is None, self._selection.layers
        key = (shapes, *kind, *(array.shape for array in slots))
        logits, *states = step.compiled.call(
            key,
            lambda: self._compiled(caches, step.template(kinds), len(injected)),
            *(step.seen, tokens, rows, [*slots, *injected, *arrays]),
        )
        return self._kept(logits, states, caches.paged[-1])

    def _kept(self, logits: Any, states: Sequence[Any], last: PagedLayer) -> Any:
        """Return `logits`. The last hidden `states` (T, D) of all tokens show when keys and values are written; those
        of early layers and in front of layers come before them."""
        *streams, last.written = states
        count, selection = len(self._early), self._selection
        selection.early, tapped = streams[:count], streams[count:]
        if selection.keep is not None:
            selection.tapped = dict(zip(selection.layers, map(selection.kept_of, tapped), strict=True))
            selection.add(last.written)
        return logits

    def _compiled(self, caches: LayerCaches, template: PagedPass, injected: int) -> Callable[..., Any]:
        return compiled_pass(self._compile, self._program(caches, template, injected), template.seen)

    def _program(self, caches: LayerCaches, template: PagedPass, injected: int) -> Callable[..., Any]:
        """The pass as a function of its arrays, `injected` of which are an injection's, to be compiled: that takes a
        tenth of the host's time. Passes come in few shapes, also of arrays that grow with the sequences' lengths."""

        def program(tokens: Any, rows: Any | None, arrays: Sequence[Any]) -> tuple[Any, ...]:
            count = len(caches.slots)
            injection, rest = Injection.of(arrays[count : count + injected]), arrays[count + injected :]
            with caches.tracing(arrays[:count]), self._traced():
                return self._pass(tokens, rows, template.filled(rest), caches.arrangement, injection)

        return program

    def _pass(
        self, tokens: Any, rows: Any | None, step: PagedPass, cache: Sequence[Any], injection: Injection | None = None
    ) -> tuple[Any, ...]:
        """Logits of the tokens at `rows`, or of all, and hidden states (T, D) of all tokens: those behind EARLY layers,
        in front of layers that are tapped, and the last ones, computed from all keys and values, and from all recurrent
        states."""
        self._restart()
        kernels, computed = self._layer_kernels, self._begun(step)
        x = y = self._embed(tokens.reshape(-1))
        if injection is not None:
            x = y = injection.into(x, self._embedding_scale)
        injected = {} if injection is None else dict(zip(self._ends, range(len(injection.deepstack)), strict=False))
        if self._steps[0].before is not None:
            y = self._steps[0].before(x)
        wanted, streams = [*self._early, *self._selection.layers], {0: x}
        more: list[Any] = []
        for one, following in zip(self._steps, [*self._steps[1:], None], strict=True):
            own = None if one.place is None else cache[one.place]
            branch = one.branch(y, x, own, computed)
            beside = one.computed_beside(y, x, more, computed)
            norm, others = (self._norm, ()) if following is None else (following.before, following.more)
            x, y, *more = kernels.add_norm(x, branch, norm, one.added, beside, others)
            if id(one) in injected and injection is not None:
                x = injection.behind(injected[id(one)], x)
                y, more = x if norm is None else norm(x), [other(x) for other in others]
            if (layer := self._ends.get(id(one))) in wanted:
                streams[layer] = x
        logits = self._head(y if rows is None else y[rows])[:, None]
        self._restart()
        FETCHED.clear()
        return logits, *(streams[layer] for layer in wanted), y

    def _begun(self, step: PagedPass) -> FusedPass:
        kernels, positions = self._layer_kernels, step.positions
        cos_sin = {key: one.cos_sin(positions, self._axes, kernels) for key, one in self._rotations.items()}
        positions = positions if positions.ndim == 1 else positions[:, 0]
        if self._query_scale is None:
            return FusedPass(step, kernels, self._mixer_kernels, cos_sin)
        model, scale = self._query_scale
        factors = scale(model, positions).astype(self._norm_dtype)
        return FusedPass(step, kernels, self._mixer_kernels, cos_sin, factors[:, None, None, None])

    @property
    def _norm_dtype(self) -> Any:
        return mx.float32 if self._norm.weight is None else self._norm.weight.dtype

    def _restart(self) -> None:
        """Forget the last launch of another graph."""
        if self._order is not None:
            self._order.restart()


class _Reading:
    """Reads the layers of a `model` of some `family`, but for parts that stay its `own`; their products share
    `tools`."""

    def __init__(self, model: Any, family: Family, tools: Tools, own: Collection[Part]) -> None:
        self._family = family
        self._tools = tools
        self._multiplier = family.residual_scale(model)
        self._dtype = tools.dtype
        self._own = own

    def steps(self, layer: Any, caches: Sequence[Kernels | None], place: int | None) -> list[_Step]:
        """The branches of mlx-lm's `layer`, whose cache is at `place` (None: it has none). `caches` has the kernels of
        each cache of the model that has pages."""
        family, names = self._family, self._family.norms
        mixer = None if place is None else self._mixer(layer, caches[place])
        single = family.single and mixer is not None
        mlp, beside, beside_norms = (None, None, ()) if single else self._mlp(layer)

        def norm(name: str | None) -> Norm | None:
            return None if name is None else Norm.of(part(layer, name), self._dtype)

        def added(name: str | None, output: float = 1.0) -> Residual:
            return Residual(norm(name), self._multiplier, family.clipped, output)

        before_mlp, last = norm(names.before_mlp), added(names.after_mlp, _output_scale(layer))
        if beside_norms:
            last = replace(last, branch=norm(names.after_mlp_alone), other=norm(names.after_experts))
        before = norm(names.before_attention)
        if mixer is not None and mlp is not None and getattr(layer, "use_parallel_residual", family.parallel):
            own = () if before_mlp is None else (before_mlp,)
            return [_Step(mixer, before, last, place, mlp, own)]
        steps = [] if mixer is None else [_Step(mixer, before, added(names.after_attention), place)]
        return steps if mlp is None else [*steps, _Step(mlp, before_mlp, last, None, beside, beside_norms)]

    def _mixer(self, layer: Any, kernels: Kernels | None) -> Branch:
        """The mixer of a layer over pages that `kernels` read, or with recurrent states (None)."""
        family = self._family
        module = part(layer, next((name for name in family.mixers if name in layer), family.attention))
        for kind in _MIXERS:
            try:
                made: _Mixer = kind.of(module, family, kernels, self._tools)
            except NotImplementedError:
                continue
            if made.part not in self._own:
                return made
        return OwnMixer(module)

    def _mlp(self, layer: Any) -> tuple[Branch, Branch | None, Sequence[Norm]]:
        """The MLP of a layer, a branch beside it, and the norms before that."""
        if getattr(layer, "per_layer_input_gate", None) is not None:
            raise NotImplementedError("layers with embeddings of their own")
        family = self._family
        if family.shared_mlp is not None and family.shared_mlp[0] in layer:
            name, *names = family.shared_mlp
            return OwnMlp(part(layer, family.experts)), self._fused_mlp(part(layer, name), names), ()
        made = self._fused_mlp(part(layer, family.mlp))
        if not getattr(layer, "enable_moe", False):
            return made, None, ()
        experts = Experts.of(layer, self._tools, self._dtype)
        return made, experts, experts.norms

    def _fused_mlp(self, module: Any, names: Sequence[str] = ()) -> Branch:
        try:
            return FusedMlp.of(module, self._family, self._tools, names)
        except NotImplementedError:
            return OwnMlp(module)


def _caches(kernels: Sequence[Kernels], layout: CacheLayout | None) -> list[Kernels | None]:
    """The kernels of each of a model's caches, None for those of recurrent layers."""
    if layout is None:
        return list(kernels)
    if any(layout.lists) or CacheKind.UNUSED in layout.kinds:
        raise NotImplementedError("its layers have several caches, or none")
    rest = iter(kernels)
    return [next(rest) if kind is CacheKind.ATTENTION else None for kind in layout.kinds]


def _output_scale(layer: Any) -> float:
    """The factor of a layer's whole output."""
    scalar = getattr(layer, "layer_scalar", None)
    return 1.0 if scalar is None else float(scalar.item())


def _product_bytes(layers: Sequence[Any]) -> int:
    """Mean bytes of a layer's parameters, without its experts: those have kernels of their own."""
    arrays = [array for layer in layers for _, array in tree_flatten(layer.parameters())]
    return sum(int(array.nbytes) for array in arrays if array.ndim < _OF_EXPERTS) // len(layers)


def _ways(layers: Sequence[Any]) -> int:
    """The number of ways in which linear layers are quantized, or not."""
    modules = [module for layer in layers for module in layer.modules()]
    ways = {Quantization.of(module) for module in modules if type(module) is nn.QuantizedLinear}
    return len(ways) + any(type(module) is nn.Linear for module in modules)


def _shared_rotations(steps: list[_Step]) -> list[_Step]:
    """The steps, with one rotation for all that are equal."""
    known: list[Rotary] = []
    shared = []
    for step in steps:
        attention = step.branch
        if isinstance(attention, FusedAttention | FusedLatentAttention) and (rotary := attention.rotary) is not None:
            same = next((one for one in known if one.interleaved == rotary.interleaved and one.equals(rotary)), None)
            if same is None:
                known.append(rotary)
            step = replace(step, branch=replace(attention, rotary=same or rotary))
        shared.append(step)
    return shared
