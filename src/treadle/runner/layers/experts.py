"""Mixtures of experts on CUDA: mlx-lm's SwitchGLU and SwitchMLP in three launches that read each chosen expert once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...core.compute_path import KernelName, KernelState, KernelStatus
from ..device.cuda import CudaKernel, NewKernel
from ..device.properties import DeviceProperties
from ..device.self_test import not_applicable
from ..fused.mixture_kernels import Choice
from .grouped_product import (
    MOST_EXPERTS,
    Activation,
    Between,
    ExpertWeights,
    Format,
    GroupedProduct,
    Mode,
    Routing,
    Tuning,
)
from .replace import Faster, Makers, full_name

_DEPTH, _ROWS = 64, 16
"""What columns and rows of weights must be multiples of."""
_BITS = {Mode.AFFINE: (2, 3, 4, 5, 6, 8), Mode.MXFP4: (4,), Mode.NVFP4: (4,), Mode.MXFP8: (8,)}
_GROUPS = {Mode.AFFINE: (32, 64, 128), Mode.MXFP4: (32,), Mode.NVFP4: (16,), Mode.MXFP8: (32,)}
_LARGEST_SCALE = {Mode.MXFP4: 128, Mode.MXFP8: 134}
"""The largest exponents, with their bias of 127, that a weight may be multiplied by in bfloat16 at once."""
_SWITCH, _MODELS = "mlx_lm.models.switch_layers", "mlx_lm.models"
_TOKENS, _PAIRS = (1, 5), (20, 50, 100)
"""Tokens, and pairs per expert, of self-tests: chunks of several heights in each kernel."""


@dataclass(frozen=True)
class _Linear:
    """Weights of a linear layer, and the type of x that they take. With `prepare` the layer's arrays are views of them,
    with `restore` they are the layer's own again."""

    weights: ExpertWeights
    dtype: Any
    prepare: Callable[[], None]
    restore: Callable[[], None]

    @property
    def inputs(self) -> int:
        return int(self.weights.weight.shape[2]) * (32 if self.weights.form.bits < 16 else 16) // self.weights.form.bits


class Experts:
    """The experts of one layer: products with `first` (the gate and the linear part, or one weight), then `between`,
    then the product with `last`. Where `between` is None, `activation` is called instead, with the linear part and the
    gate. `own` computes x of other types."""

    def __init__(
        self,
        product: GroupedProduct,
        first: Sequence[_Linear],
        last: _Linear,
        between: Between | None,
        activation: Callable[..., Any],
        own: Callable[..., Any],
    ) -> None:
        self.product = product
        self.count = last.weights.experts
        self._first = [one.weights for one in first]
        self._last = last.weights
        self._between = between
        self._activation = activation
        self._own = own
        self._dtypes = {one.dtype for one in (*first, last)}

    def takes(self, dtype: Any) -> bool:
        """Whether the kernels compute x of that type."""
        return self._dtypes == {dtype}

    def __call__(self, x: Any, indices: Any) -> Any:
        """(..., k, N) of `x` (..., K) and the experts `indices` (..., k) of each token."""
        if not self.takes(x.dtype):
            return self._own(x, indices)
        flat, pairs = x.reshape(-1, x.shape[-1]), indices.reshape(-1).astype(mx.uint32)
        routing = self.product.route(pairs, self.count, flat.shape[0])
        return self.routed(flat, routing).reshape(*indices.shape, -1)

    def chosen(self, x: Any, logits: Any, choice: Choice) -> tuple[Any, Any]:
        """Outputs (T, k, N) of the experts that are chosen for `x` (T, K) by `logits`, and their weights (T, k)."""
        weights, routing = self.product.choose(logits, choice)
        return self.routed(x, routing).reshape(*weights.shape, -1), weights

    def routed(self, flat: Any, routing: Routing) -> Any:
        """(P, N) of tokens `flat` (T, K), routed to pairs (P,)."""

        def products(weights: Sequence[ExpertWeights], between: Between = _NOTHING) -> Any:
            return self.product(flat, weights, routing, between, tokens=True)

        if self._between is not None:
            h = products(self._first, self._between)
        else:  # a SwitchGLU has the linear part first
            h = self._activation(*(products([one]) for one in reversed(self._first)))
        return self.product(h, [self._last], routing, _NOTHING, tokens=False)


_NOTHING = Between()


class ExpertMakers:
    """Makers of faster layers with experts, for kernels made by `kernel` (None: there are none). The model computes in
    `dtype`."""

    def __init__(
        self,
        dtype: Any,
        kernel: NewKernel | None = CudaKernel,
        chip: DeviceProperties | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self._dtype = dtype
        self._product = None if kernel is None else GroupedProduct(kernel, chip, tuning)
        self._labels: dict[str, None] = {}
        self._reasons: dict[str, None] = {}

    @property
    def makers(self) -> Makers:
        if self._product is None:
            return {}
        return {f"{_SWITCH}.SwitchGLU": self.switch_glu, f"{_SWITCH}.SwitchMLP": self.switch_mlp}

    def statuses(self, rejected: Mapping[str, str]) -> list[KernelStatus]:
        """State of the kernels, if there are any, given the reasons against layers by their labels."""
        return [] if self._product is None else [self._status(rejected)]

    def _status(self, rejected: Mapping[str, str]) -> KernelStatus:
        name = KernelName.EXPERTS
        if failed := [rejected[label] for label in self._labels if label in rejected]:
            return KernelStatus(name, KernelState.FAILED, "; ".join(failed))
        if self._labels:
            return KernelStatus(name, KernelState.ACTIVE)
        return not_applicable(name, "; ".join(self._reasons) or "the model has no experts")

    def switch_glu(self, layer: Any) -> Faster | None:
        """Faster methods of a SwitchGLU. None where the kernels don't take its weights."""
        return self._faster(layer, [layer.gate_proj, layer.up_proj], layer.down_proj, _gated(layer.activation))

    def switch_mlp(self, layer: Any) -> Faster | None:
        """As `switch_glu`, for a SwitchMLP."""
        return self._faster(layer, [layer.fc1], layer.fc2, _pointwise(layer.activation))

    def _faster(self, layer: Any, first: Sequence[Any], last: Any, between: Between | None) -> Faster | None:
        assert self._product is not None
        if reasons := [why for one in (*first, last) if (why := reason_against(one, self._dtype))]:
            self._reasons[reasons[0]] = None
            return None
        linears = [_packed(one, self._dtype) for one in (*first, last)]
        if len(first) == 2 and not _alike(*linears[:2]):
            between = None
        own = partial(type(layer).__call__, layer)
        experts = Experts(self._product, linears[:-1], linears[-1], between, layer.activation, own)
        shapes = tuple((one.weights.weight.shape, one.weights.form, one.dtype) for one in linears)
        label = f"experts ({linears[0].weights.experts} of {linears[0].inputs} x {linears[0].weights.outputs})"
        self._labels[label] = None

        kind = type(layer), shapes, between
        prepare, restore = (partial(_each, linears, name) for name in ("prepare", "restore"))
        return Faster({"__call__": experts}, kind, label, lambda: _examples(linears), prepare, restore)


def reason_against(layer: Any, dtype: Any) -> str:
    """Why the kernels don't take the weights of `layer`, a SwitchLinear or a quantized one, for x of `dtype`; empty if
    they do."""
    if (name := full_name(type(layer))) == f"{_SWITCH}.SwitchLinear":
        dtype, form, columns = layer.weight.dtype, Format(), layer.weight.shape[2]
    elif name == f"{_SWITCH}.QuantizedSwitchLinear":
        try:
            form = Format(Mode[layer.mode.upper()], layer.bits, layer.group_size)
        except KeyError:
            return f"weights quantized as {layer.mode}"
        dtype, columns = (layer.scales.dtype if form.mode is Mode.AFFINE else dtype), layer.input_dims
        if form.bits not in _BITS[form.mode] or form.group not in _GROUPS[form.mode]:
            return f"weights of {form.bits} bits in groups of {form.group}"
        if layer.get("global_scale") is not None:
            return "weights with a scale of each expert"
        if form.mode in _LARGEST_SCALE and layer.scales.max().item() > _LARGEST_SCALE[form.mode]:
            return "scales that are too large"
    else:
        return f"experts of class {name}"
    if dtype not in (mx.bfloat16, mx.float16):
        return f"weights in {dtype}"
    experts, outputs = layer.weight.shape[:2]
    if columns % max(_DEPTH * form.span, form.group) or outputs % _ROWS or experts > MOST_EXPERTS:
        return f"{experts} experts of {columns} columns and {outputs} rows"
    return ""


def _alike(gate: _Linear, up: _Linear) -> bool:
    return gate.weights.form == up.weights.form and (gate.weights.bias is None) == (up.weights.bias is None)


def _each(linears: Sequence[_Linear], name: str) -> None:
    for one in linears:
        getattr(one, name)()


def _packed(layer: Any, dtype: Any) -> _Linear:
    """Weights as the kernels read them. Without scales in a type of their own they take x of `dtype`."""
    layer.weight = mx.contiguous(layer.weight)
    if "scales" not in layer:
        form, scales, dtype = Format(), None, layer.weight.dtype
    else:
        form = Format(Mode[layer.mode.upper()], layer.bits, layer.group_size)
        dtype = layer.scales.dtype if form.mode is Mode.AFFINE else dtype
        scales = _laid_out(layer, form.mode)
    bias = None if "bias" not in layer else mx.contiguous(layer.bias.astype(dtype))
    mx.eval(layer.parameters(), bias, scales)  # not in each pass
    weights = ExpertWeights(form, layer.weight, scales, bias)
    return _Linear(weights, dtype, partial(_view, layer, scales), partial(_unpack, layer))


def _laid_out(layer: Any, mode: Mode) -> Any:
    """Scales, with biases beside them where there are any, in the kernels' order."""
    if mode is not Mode.AFFINE:
        return mx.contiguous(layer.scales.swapaxes(1, 2))
    return mx.contiguous(mx.stack([layer.scales, layer.biases], axis=-1).swapaxes(1, 2))


def _view(layer: Any, scales: Any | None) -> None:
    """Let the layer's scales and biases be views of those in the kernels' order, of which there is one copy then. MLX's
    own products don't take them like this."""
    if scales is None:
        return
    names = ("scales", "biases") if scales.ndim == 4 else ("scales",)
    views = [scales[..., i].swapaxes(1, 2) for i in range(2)] if scales.ndim == 4 else [scales.swapaxes(1, 2)]
    for name, view in zip(names, views, strict=True):
        mx.eval(view)
        setattr(layer, name, view)


def _unpack(layer: Any) -> None:
    """Give the layer scales and biases of its own."""
    for name in ("scales", "biases"):
        if layer.get(name) is not None:
            setattr(layer, name, mx.contiguous(layer[name]))
            mx.eval(layer[name])


def _gated(activation: Any) -> Between | None:
    """The activation of a SwitchGLU, as the kernels have it."""
    name = full_name(type(activation))
    limit = getattr(activation, "limit", 0.0)
    if name == f"{_MODELS}.activations.SwigluOAI":
        return Between(Activation.CLAMPED_OAI, activation._alpha, activation._limit)
    known = {
        f"{_SWITCH}.SwiGLU": Between(Activation.SILU),
        f"{_MODELS}.muse_spark.PreciseSwiGLU": Between(Activation.SILU),
        f"{_MODELS}.gemma4_text.GeGLU": Between(Activation.GELU_TANH),
        f"{_MODELS}.step3p5.ClampedSwiGLU": Between(Activation.SILU_CLAMPED, limit=limit),
        f"{_MODELS}.deepseek_v41.DeepseekV41SwiGLU": Between(
            Activation.CLAMPED_SILU if limit > 0 else Activation.SILU, limit=limit
        ),
    }
    return known.get(name)


def _pointwise(activation: Any) -> Between | None:
    """The activation of a SwitchMLP, as the kernels have it."""
    if type(activation) is nn.ReLU2:
        return Between(Activation.RELU2)
    if type(activation) is nn.SiLU:
        return Between(Activation.SILU)
    if type(activation) is nn.GELU and activation._approx != "fast":
        return Between(Activation.GELU_ERF if activation._approx == "none" else Activation.GELU_TANH)
    return None


def _examples(linears: Sequence[_Linear]) -> Iterator[tuple[Any, ...]]:
    """Arguments of a layer: tokens of which each has different experts, for both kernels."""
    first = linears[0]
    experts = first.weights.experts
    top, key = min(4, experts), mx.random.key(0)
    for tokens in (*_TOKENS, *(pairs * experts // top for pairs in _PAIRS)):
        x = mx.random.normal((tokens, 1, first.inputs), key=key).astype(first.dtype)
        chosen = mx.argsort(mx.random.uniform(shape=(tokens, 1, experts), key=key), axis=-1)[..., :top]
        yield x, chosen
