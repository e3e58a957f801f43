"""Decoder with fused layers, over pages, for the families of `families`.

It is made from mlx-lm's module: weights that are used together are concatenated once (q, k and v; gate and up), and the
module's own layers become views of them, so that nothing is held twice and the module still works. Attention and MLPs
with unknown parts, and mixtures of experts, stay the module's own, between norms of ours. The decoder is used only
where a self-test gave the module's own logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...core.compute_path import KernelStatus
from ..kv.paged.kernels import Kernels
from ..kv.paged.layer import PagedLayer
from ..kv.paged.paged_pass import PagedPass
from ..mlxlm import FETCHED, Selection
from .families import Family, family_of, part
from .kernels import LayerKernels, Residual, Table
from .layer import (
    Attention,
    FusedAttention,
    FusedMlp,
    FusedPass,
    Mlp,
    MlpAndExperts,
    OwnAttention,
    OwnMlp,
)
from .merged_linear import MergedLinear, Tools, merge_linears, quantized_linear
from .norms import Norm
from .quantization import Quantization
from .rotary import Rotary
from .workspace import LaunchOrder


@dataclass(frozen=True)
class _Layer:
    """A layer's branches, their norms, and how they are added. `reasons` are those against fused branches."""

    attention: Attention
    mlp: Mlp
    before_attention: Norm | None
    before_mlp: Norm | None
    attention_added: Residual
    mlp_added: Residual
    parallel: bool
    reasons: tuple[str, ...] = ()

    @property
    def products(self) -> Iterator[MergedLinear]:
        """The layer's matrix products."""
        mlp = self.mlp.mlp if isinstance(self.mlp, MlpAndExperts) else self.mlp
        if isinstance(self.attention, FusedAttention):
            yield from (*self.attention.qkv.products, *self.attention.out.products)
        if isinstance(mlp, FusedMlp):
            yield from (*mlp.inputs.products, *mlp.down.products)

    @property
    def rotary(self) -> Rotary | None:
        return self.attention.rotary if isinstance(self.attention, FusedAttention) else None

    @property
    def own_modules(self) -> Iterator[Any]:
        """Modules of mlx-lm that compute branches."""
        mlp = self.mlp
        if isinstance(mlp, MlpAndExperts):
            yield from (mlp.layer.router, mlp.layer.experts)
            mlp = mlp.mlp
        yield from (one.module for one in (self.attention, mlp) if isinstance(one, (OwnAttention, OwnMlp)))


class FusedDecoder:
    """Computes `module`'s passes over pages that the `kernels` of its layers read, with `selection` before its head.

    Passes are traced within `traced`, where the model's own modules are to know of that. Raises NotImplementedError for
    other families.
    """

    def __init__(
        self,
        module: Any,
        kernels: Sequence[Kernels],
        selection: Selection | None,
        traced: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        model, family = family_of(module)
        if selection is None:
            raise NotImplementedError("its last norm is not known")
        inner, dtype = part(model, family.decoder), kernels[0].dtype
        layers = part(inner, family.layers)
        if len(layers) != len(kernels):
            raise NotImplementedError("layers that share keys and values")
        self.family = type(model).__module__.rpartition(".")[2]
        self._compile = kernels[0].compile
        self._layer_kernels = LayerKernels(kernels[0].kernel)
        self._traced = traced
        self._selection = selection
        embedding = part(inner, family.embedding)
        self._embed = _scaled(_embedding(embedding, self._layer_kernels), family.embedding_scale(model))
        self._norm = Norm.of(part(inner, family.last_norm), dtype)
        tools = Tools.of(kernels[0].kernel, _bytes(layers[0]), dtype)
        if family.parallel or _ways(layers) > 1:
            tools = replace(tools, order=LaunchOrder(dtype))
        self._order = tools.order
        reading = _Reading(model, family, tools)
        self._layers = _shared_rotations([reading.layer(*pair) for pair in zip(layers, kernels, strict=True)])
        if not any(True for layer in self._layers for _ in layer.products):
            raise NotImplementedError(", ".join(dict.fromkeys(self._layers[0].reasons)))
        self._rotations = {id(one): one for one in (layer.rotary for layer in self._layers) if one is not None}
        self._query_scale = None if family.query_scale is None else (model, family.query_scale)
        self._head = _head(model, family, embedding, tools)
        self.own_modules = [one for layer in self._layers for one in layer.own_modules]
        self.product_kernels: list[KernelStatus] = tools.statuses(
            [product for layer in self._layers for product in layer.products]
        )

    @property
    def own_parts(self) -> str:
        """The branches that mlx-lm's modules compute, with their number; empty where there are none."""
        names = Counter(type(module).__name__ for module in self.own_modules)
        return ", ".join(f"{count} {name}" for name, count in names.items())

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
            with self._traced():
                return self._pass(tokens, rows, template.filled(arrays), cache)

        return program

    def _pass(self, tokens: Any, rows: Any | None, step: PagedPass, cache: Sequence[PagedLayer]) -> tuple[Any, Any]:
        """Logits of the tokens at `rows`, or of all, and the hidden states (T, D) of all tokens, computed from all keys
        and values."""
        self._restart()
        kernels, layers = self._layer_kernels, self._layers
        computed = self._begun(step)
        x = y = self._embed(tokens.reshape(-1))
        if layers[0].before_attention is not None:
            y = layers[0].before_attention(x)
        norms = [*(layer.before_attention for layer in layers[1:]), self._norm]
        for layer, pages, norm in zip(layers, cache, norms, strict=True):
            branch = layer.attention(y, pages, computed)
            if layer.parallel:
                y = y if layer.before_mlp is None else layer.before_mlp(x)
                x, y = kernels.add_norm(x, branch, norm, layer.mlp_added, layer.mlp(y, x, computed))
                continue
            x, y = kernels.add_norm(x, branch, layer.before_mlp, layer.attention_added)
            x, y = kernels.add_norm(x, layer.mlp(y, x, computed), norm, layer.mlp_added)
        logits = self._head(y if rows is None else y[rows])[:, None]
        self._restart()
        FETCHED.clear()
        return logits, y

    def _begun(self, step: PagedPass) -> FusedPass:
        kernels, positions = self._layer_kernels, step.positions
        cos_sin = {key: kernels.cos_sin(positions, one.inv_freq, one.scale) for key, one in self._rotations.items()}
        if self._query_scale is None:
            return FusedPass(step, kernels, cos_sin)
        model, scale = self._query_scale
        factors = scale(model, positions).astype(self._norm_dtype)
        return FusedPass(step, kernels, cos_sin, factors[:, None, None, None])

    @property
    def _norm_dtype(self) -> Any:
        return mx.float32 if self._norm.weight is None else self._norm.weight.dtype

    def _restart(self) -> None:
        """Forget the last launch of another graph."""
        if self._order is not None:
            self._order.restart()


class _Reading:
    """Reads the layers of a `model` of some `family`; their products share `tools`."""

    def __init__(self, model: Any, family: Family, tools: Tools) -> None:
        self._family = family
        self._tools = tools
        self._multiplier = family.residual_scale(model)

    def layer(self, layer: Any, kernels: Kernels) -> _Layer:
        """The layer, made from mlx-lm's `layer`, over pages that `kernels` read."""
        family, names, reasons = self._family, self._family.norms, list[str]()

        def norm(name: str | None) -> Norm | None:
            return None if name is None else Norm.of(part(layer, name), kernels.dtype)

        parallel = bool(getattr(layer, "use_parallel_residual", family.parallel))
        return _Layer(
            attention=self._attention(part(layer, family.attention), kernels, reasons),
            mlp=self._mlp(layer, kernels.dtype, reasons),
            before_attention=norm(names.before_attention),
            before_mlp=norm(names.before_mlp),
            attention_added=Residual(norm(names.after_attention), self._multiplier, family.clipped),
            mlp_added=Residual(norm(names.after_mlp), self._multiplier, family.clipped, _output_scale(layer)),
            parallel=parallel,
            reasons=tuple(reasons),
        )

    def _attention(self, module: Any, kernels: Kernels, reasons: list[str]) -> Attention:
        try:
            return FusedAttention.of(module, self._family, kernels, self._tools)
        except NotImplementedError as error:
            reasons.append(str(error))
            return OwnAttention(module)

    def _mlp(self, layer: Any, dtype: Any, reasons: list[str]) -> Mlp:
        if getattr(layer, "per_layer_input_gate", None) is not None:
            raise NotImplementedError("layers with embeddings of their own")
        module, mlp = part(layer, self._family.mlp), None
        try:
            mlp = FusedMlp.of(module, self._family, self._tools)
        except NotImplementedError as error:
            reasons.append(str(error))
        made = OwnMlp(module) if mlp is None else mlp
        return MlpAndExperts.of(made, layer, self._tools, dtype) if getattr(layer, "enable_moe", False) else made


def _output_scale(layer: Any) -> float:
    """The factor of a layer's whole output."""
    scalar = getattr(layer, "layer_scalar", None)
    return 1.0 if scalar is None else float(scalar.item())


def _bytes(layer: Any) -> int:
    """Bytes of the layer's parameters."""
    return sum(array.nbytes for _, array in tree_flatten(layer.parameters()))


def _ways(layers: Sequence[Any]) -> int:
    """The number of ways in which linear layers are quantized, or not."""
    modules = [module for layer in layers for module in layer.modules()]
    ways = {Quantization.of(module) for module in modules if type(module) is nn.QuantizedLinear}
    return len(ways) + any(type(module) is nn.Linear for module in modules)


def _shared_rotations(layers: list[_Layer]) -> list[_Layer]:
    """The layers, with one rotation for all that are equal."""
    known: list[Rotary] = []
    shared = []
    for layer in layers:
        attention = layer.attention
        if isinstance(attention, FusedAttention) and (rotary := attention.rotary) is not None:
            same = next((one for one in known if one.interleaved == rotary.interleaved and one.equals(rotary)), None)
            if same is None:
                known.append(rotary)
            layer = replace(layer, attention=replace(attention, rotary=same or rotary))
        shared.append(layer)
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


def _scaled(embed: Callable[[Any], Any], scale: float) -> Callable[[Any], Any]:
    return embed if scale == 1 else lambda tokens: embed(tokens) * scale


def _head(model: Any, family: Family, embedding: Any, tools: Tools) -> Callable[[Any], Any]:
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
