"""Hooks into mlx-lm's recurrent layers: states in slots, for tokens of many sequences side by side.

A state in slots is an object in place of an array, with the methods `gated_delta`, `selective`, `channels`, `lightning`
and `apply` (`runner/recurrent/layer.py`), known here by their names. Every function below computes as mlx-lm's for
arrays.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from .ngrams import TokensBefore, tokens_before

_UNIT_ROW = 4
"""Numbers in a row of the state of a unit that has one: kernels take rows of four and more."""
_LEAST_STEP = 1e-12
"""The least negative logarithm of a decay, by which inputs are divided; it is no decay in float32."""


class Convolution(Protocol):
    """The convolution of a step's inputs (T, 1, C) from slots."""

    def convolve(self, x: Any, weight: Any, bias: Any | None) -> Any: ...


class RoutedConvolution(nn.Conv1d):  # type: ignore[misc]
    """A layer's causal convolution of single channels: from the slots of `bind` where it gets inputs of one token,
    without those before; as before with arrays of its own width and longer."""

    weight: Any

    def bind(self, slots: Convolution) -> None:
        """Compute from `slots` from now on."""
        if getattr(self, "_slots", None) is None:  # once, as kernels would copy it at each launch
            self.weight = mx.contiguous(self.weight)
            mx.eval(self.weight)
        self._slots = slots

    def __call__(self, x: Any) -> Any:
        slots = getattr(self, "_slots", None)
        if slots is None or x.shape[1] >= self.weight.shape[1]:
            return super().__call__(x)
        return slots.convolve(x, self.weight, self.get("bias"))


class BoundConvolution(Protocol):
    """A layer's convolution that computes from slots once they are bound."""

    weight: Any

    def bind(self, slots: Convolution) -> None: ...


class MixedHeads:
    """A convolution of keys or values (T, 1, heads * D) with weights of each head."""

    def __init__(self, weights: Any, width: int, dim: int) -> None:
        taps = weights.reshape(-1, width)
        self.weight = mx.repeat(taps, dim, axis=0)[..., None]
        self._slots: Convolution | None = None

    def bind(self, slots: Convolution) -> None:
        """Compute from `slots` from now on."""
        if self._slots is None:
            self.weight = mx.contiguous(self.weight)
            mx.eval(self.weight)  # it must not belong to a program that is traced
        self._slots = slots

    def __call__(self, x: Any, before: Any | None) -> Any:
        """Mix each token's `x` (T, 1, C) with that before it, from the slots; without any where `before` is None."""
        if before is None:
            return x * self.weight[:, -1, 0]
        assert self._slots is not None
        return self._slots.convolve(x, self.weight, None)


@dataclass(frozen=True)
class RecurrentState:
    """One state of a recurrent layer, for one sequence; with its convolution where it is one's last inputs. CUDA
    kernels can't compute on one without `kernels`."""

    shape: tuple[int, ...]
    dtype: Any
    convolution: BoundConvolution | None = None
    kernels: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.size)


def recurrent_states(model: Any, leaves: Sequence[Any]) -> list[list[RecurrentState] | None]:
    """For each of `leaves`, caches of `model` behind a pass (evaluated or not), the states in it; None where it is no
    `ArraysCache`. Routes the model's convolutions and recurrences. Raises NotImplementedError where a layer keeps
    states that are not known."""
    convolutions = _route_convolutions(model)
    known = _route_recurrences(model)
    found = [_states_of(leaf.cache, convolutions, known) if hasattr(leaf, "cache") else None for leaf in leaves]
    if convolutions:
        raise NotImplementedError("a layer's convolution has no state in the layer's cache")
    if any(hasattr(type(layer), "own_recurrence") for layer in model.modules()):
        return [states and [replace(state, kernels=False) for state in states] for states in found]
    return found


def _states_of(arrays: Sequence[Any], convolutions: list[BoundConvolution], known: bool) -> list[RecurrentState]:
    """The states of a cache; takes the convolutions that they belong to from the front of `convolutions`. `known` says
    whether the model has recurrences that were routed."""
    states = []
    for array in arrays:
        convolution = convolutions.pop(0) if convolutions and _is_of(array, convolutions[0]) else None
        if convolution is None and not (known and array is not None and array.ndim in (2, 3, 4)):
            raise NotImplementedError("a recurrent layer's state goes through no function that is known")
        states.append(_state_of(array, convolution))
    return states


def _state_of(array: Any, convolution: BoundConvolution | None) -> RecurrentState:
    shape = tuple(array.shape[1:])
    if convolution is not None:
        channels, width, _ = convolution.weight.shape
        dtype = convolution.dtype if isinstance(convolution, TokensBefore) else array.dtype
        return RecurrentState((width - 1, channels), dtype, convolution)
    return RecurrentState(shape if len(shape) > 1 else (*shape, _UNIT_ROW), array.dtype)


def _is_of(array: Any, convolution: BoundConvolution) -> bool:
    """Whether a state is that of a convolution: its last inputs, the last one of each head (heads, 1, D), or tokens."""
    channels, width, _ = convolution.weight.shape
    shape = () if array is None else tuple(array.shape[1:])
    if isinstance(convolution, TokensBefore):
        return len(shape) == 1
    if len(shape) == 3 and isinstance(convolution, MixedHeads):
        return bool(shape[1] == width - 1 and shape[0] * shape[2] == channels)
    return bool(shape == (width - 1, channels))


def has_convolution(part: Any) -> bool:
    """Whether there is a convolution inside of `part` whose state is in slots."""
    return any(hasattr(one, "bind") for one in part.modules())


def _route_recurrences(model: Any) -> bool:
    """Route the recurrences of `model`'s layers to states in slots. False where none is known."""
    found = False
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        for name, route in _FUNCTIONS.items():
            function = getattr(module, name, None)
            if function is None:
                continue
            found = True
            if not hasattr(function, "routes"):
                setattr(module, name, _marked(route(function)))
    for layer in model.modules():
        kind = type(layer).__module__, type(layer).__name__
        if kind in _CHANNEL_MIXERS:
            layer.__class__ = _with_step(type(layer), _CHANNEL_MIXERS[kind])
        if kind in _UNITS:
            layer.__class__ = _with_call(type(layer), _UNITS[kind])
        if kind in _OWN and not hasattr(type(layer), "own_recurrence"):
            layer.__class__ = _by_itself(type(layer), _OWN[kind])
        found = found or hasattr(type(layer), "channel_mixer") or hasattr(type(layer), "own_recurrence")
    return found


def _route_convolutions(model: Any) -> list[BoundConvolution]:
    """The causal convolutions of `model`'s embeddings and layers, in the order of the layers and of their parts."""
    in_layers = [one for layer in model.layers for part in layer.modules()[::-1] for one in _convolutions_of(part)]
    return [*tokens_before(model), *in_layers]


def _convolutions_of(parent: Any) -> Iterator[BoundConvolution]:
    if (type(parent).__module__, type(parent).__name__) in _MIXERS:
        yield from mixed_heads(parent)
    for child in parent.children().values():
        if (type(child).__module__, type(child).__name__) in _SHIFTS and not hasattr(child, "bind"):
            child.__class__ = _shifted(type(child), int(parent.x_k.shape[-1]))
        if type(child) is nn.Conv1d and child.weight.shape[2] == 1:
            child.__class__ = RoutedConvolution
        if (type(child).__module__, type(child).__name__) in _CONVOLUTIONS and not hasattr(child, "bind"):
            child.__class__ = _with_state(type(child))
        if hasattr(child, "bind"):
            yield child


def mixed_heads(attention: Any) -> tuple[MixedHeads, MixedHeads]:
    """The convolutions of keys and of values of an `attention` module that mixes them with the token before."""
    own = vars(attention)
    if "mixed_heads" not in own:
        arguments = attention.conv_window, attention.head_dim
        own["mixed_heads"] = MixedHeads(attention.conv_k, *arguments), MixedHeads(attention.conv_v, *arguments)
    made: tuple[MixedHeads, MixedHeads] = own["mixed_heads"]
    return made


def _shifted(kind: Any, channels: int) -> type:
    """The class `kind` of a shift by one token, of inputs with so many channels, which may be bound to slots."""
    weight = mx.broadcast_to(mx.array([1.0, 0.0])[:, None], (channels, 2, 1))

    def bind(self: Any, slots: Convolution) -> None:
        self._slots = slots

    def call(self: Any, x: Any, state: Any) -> Any:
        slots = getattr(self, "_slots", None)
        if slots is None or state is None or state.shape[1]:
            return kind.__call__(self, x, state)
        return slots.convolve(x, self.weight.astype(x.dtype), None)

    members = {"__call__": call, "__module__": kind.__module__, "bind": bind, "weight": weight}
    return type(kind.__name__, (kind,), members)


def _by_itself(kind: Any, name: str) -> type:
    """The class `kind` of a mixer whose method `name` is a recurrence, of inputs and a state, which computes states in
    slots, too, wherever segments begin."""
    own: Callable[..., tuple[Any, Any]] = getattr(kind, name)

    def recurrence(self: Any, *arrays: Any) -> tuple[Any, Any]:
        *inputs, state = arrays
        if not hasattr(state, "apply"):
            return own(self, *arrays)
        return state.apply(partial(own, self), inputs), state

    return type(kind.__name__, (kind,), {name: recurrence, "__module__": kind.__module__, "own_recurrence": True})


def _with_state(kind: Any) -> type:
    """The class `kind` of a convolution that gets its state and returns it, which may be bound to slots."""

    def call(self: Any, x: Any, cache: Any = None) -> tuple[Any, Any]:
        slots = getattr(self, "_slots", None)
        if slots is None or cache is None or cache.shape[1]:
            return kind.__call__(self, x, cache)  # type: ignore[no-any-return]
        return slots.convolve(x, self.weight, self.bias), cache

    members = {"__call__": call, "__module__": kind.__module__, "bind": RoutedConvolution.bind}
    return type(kind.__name__, (kind,), members)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    function.routes = True  # type: ignore[attr-defined]
    return function


@dataclass
class _Deferral:
    """Whether the layer that runs has its states in slots: from the read of a state up to its gated delta rule."""

    active: bool = False


@dataclass(frozen=True)
class _Unnormalized:
    """An array before `normalize_qk`, which `gated_delta_update` is to apply. `normalized` is the array behind it."""

    array: Any
    inverse_scale: float
    epsilon: float
    normalized: Callable[[], Any]


_deferral = _Deferral()


def defer_norms() -> None:
    """Leave the normalization of the next keys and queries to their gated delta rule."""
    _deferral.active = True


def _routed_norm(shared: Callable[..., Any]) -> Callable[..., Any]:
    def normalize_qk(q: Any, k: Any, *, inv_scale: float, eps: float) -> tuple[Any, Any]:
        if not _deferral.active:
            return shared(q, k, inv_scale=inv_scale, eps=eps)  # type: ignore[no-any-return]
        both = cache(lambda: shared(q, k, inv_scale=inv_scale, eps=eps))
        return (
            _Unnormalized(q, inv_scale, eps, lambda: both()[0]),
            _Unnormalized(k, inv_scale, eps, lambda: both()[1]),
        )

    return normalize_qk


def _routed_delta(shared: Callable[..., Any]) -> Callable[..., Any]:
    def gated_delta_update(
        q: Any, k: Any, v: Any, a: Any, b: Any, a_log: Any, bias: Any, state: Any = None, mask: Any = None, **named: Any
    ) -> tuple[Any, Any]:
        _deferral.active = False
        if not hasattr(state, "gated_delta"):
            q, k = (x.normalized() if isinstance(x, _Unnormalized) else x for x in (q, k))
            return shared(q, k, v, a, b, a_log, bias, state, mask, **named)  # type: ignore[no-any-return]
        _no_mask(mask)
        norm = None
        if isinstance(q, _Unnormalized):
            q, k, norm = q.array, k.array, (q.inverse_scale, q.epsilon)
        bound, largest = named.get("lower_bound"), 2.0 if named.get("allow_neg_eigval") else 1.0
        return state.gated_delta(q, k, v, a, b, a_log, bias, lower_bound=bound, largest_beta=largest, norm=norm), state

    return gated_delta_update


def _routed_selective(shared: Callable[..., Any]) -> Callable[..., Any]:
    limits: tuple[float, float] = inspect.signature(shared).parameters["time_step_limit"].default

    def ssm_update(
        x: Any,
        a_log: Any,
        b: Any,
        c: Any,
        d: Any,
        dt: Any,
        bias: Any,
        state: Any = None,
        time_step_limit: tuple[float, float] = limits,
        mask: Any = None,
        lengths: Any = None,
    ) -> tuple[Any, Any]:
        if not hasattr(state, "selective"):
            arrays = (x, a_log, b, c, d, dt, bias, state, time_step_limit, mask, lengths)
            return shared(*arrays)  # type: ignore[no-any-return]
        _no_mask(mask)
        low, high = time_step_limit
        return state.selective(x, a_log, b, c, d, dt, bias, (float(low), float(high))), state

    return ssm_update


def _routed_lightning(shared: Callable[..., Any]) -> Callable[..., Any]:
    def recurrent_gla(q: Any, k: Any, v: Any, g: Any, scale: float, h: Any = None, **more: Any) -> tuple[Any, Any]:
        if not hasattr(h, "lightning"):
            return shared(q, k, v, g, scale=scale, h=h, **more)  # type: ignore[no-any-return]
        _no_mask(more.get("mask"))
        y = h.lightning(*(x.swapaxes(1, 2) for x in (q, k, v)), g, scale)
        return y.swapaxes(1, 2), h

    return recurrent_gla


def _no_mask(mask: Any) -> None:
    if mask is not None:
        raise NotImplementedError("the model makes a mask of its own")


def _mamba_step(self: Any, x: Any, rates: Any, state: Any = None) -> tuple[Any, Any]:
    """`MambaBlock.ssm_step` for `x` (T, C)."""
    delta, b, c = _split(self, x)
    if self.use_bcdt_rms:
        delta, b, c = (mx.fast.rms_norm(one, weight=None, eps=self.args.mixer_rms_eps) for one in (delta, b, c))
    arrays = [x, nn.softplus(self.dt_proj(delta)), b, c]
    x, delta, b, c = (one[:, None] for one in arrays)
    return (state.channels(x, delta, self.A_log, b, c) + self.D * x)[:, 0], state


def _jamba_step(self: Any, x: Any, rates: Any, state: Any = None) -> tuple[Any, Any]:
    """`JambaMambaMixer.ssm_step` for `x` (T, 1, C)."""
    delta, b, c = _split(self, x)
    delta, b, c = self.dt_layernorm(delta), self.b_layernorm(b), self.c_layernorm(c)
    delta = nn.softplus(self.dt_proj(delta))
    return state.channels(x, delta, self.A_log, b, c) + self.D * x, state


def _rg_lru(self: Any, x: Any, state: Any) -> tuple[Any, Any]:
    """`RGLRU.__call__` for `x` (T, 1, C), as channels whose states have one number in a row. A sequence's first token
    comes in as it is."""
    gates = x.reshape(x.shape[0], self.num_heads, 1, self.head_dim)
    inputs = mx.sigmoid((gates @ self.input_gate_weight)[:, :, 0] + self.input_gate_bias).reshape(x.shape)
    decays = mx.sigmoid((gates @ self.recurrent_gate_weight)[:, :, 0] + self.recurrent_gate_bias).reshape(x.shape)
    steps = mx.maximum((8.0 * decays * nn.softplus(self.recurrent_param)).astype(mx.float32), _LEAST_STEP)
    shares = mx.where(state.begins[:, None, None], 1.0, mx.sqrt(1 - mx.exp(-2 * steps)))
    first = (mx.arange(_UNIT_ROW) == 0).astype(mx.float32)
    row = mx.broadcast_to(first, (*x.shape[:2], _UNIT_ROW))
    rates = mx.zeros((x.shape[-1], _UNIT_ROW))
    return state.channels(x * inputs * shares / steps, steps, rates, row, row).astype(x.dtype), state


def _split(mixer: Any, x: Any) -> list[Any]:
    rank = mixer.time_step_rank
    return list(mx.split(mixer.x_proj(x), [rank, rank + mixer.ssm_state_size], axis=-1))


def _with_call(kind: Any, computed: Callable[..., Any]) -> type:
    """The class of a recurrence of single units, for states in slots as well."""

    def call(self: Any, x: Any, cache: Any = None) -> Any:
        return computed(self, x, cache) if hasattr(cache, "channels") else kind.__call__(self, x, cache)

    members = {"__call__": call, "__module__": kind.__module__, "channel_mixer": True}
    return type(f"Routed{kind.__name__}", (kind,), members)


def _with_step(mixer: type, step: Callable[..., Any]) -> type:
    """The class of a mixer of Mamba 1 with a step for states in slots."""
    own: Callable[..., Any] = mixer.ssm_step  # type: ignore[attr-defined]

    def ssm_step(self: Any, x: Any, rates: Any, state: Any = None) -> Any:
        return step(self, x, rates, state) if hasattr(state, "channels") else own(self, x, rates, state)

    members = {"ssm_step": ssm_step, "__module__": mixer.__module__, "channel_mixer": True}
    return type(f"Routed{mixer.__name__}", (mixer,), members)


_FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "normalize_qk": _routed_norm,
    "gated_delta_update": _routed_delta,
    "ssm_update": _routed_selective,
    "recurrent_gla": _routed_lightning,
}
_CHANNEL_MIXERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("mlx_lm.models.mamba", "MambaBlock"): _mamba_step,
    ("mlx_lm.models.jamba", "JambaMambaMixer"): _jamba_step,
}
_UNITS: dict[tuple[str, str], Callable[..., Any]] = {("mlx_lm.models.recurrent_gemma", "RGLRU"): _rg_lru}
_CONVOLUTIONS = {("mlx_lm.models.recurrent_gemma", "Conv1d")}
_MIXERS = {("mlx_lm.models.baichuan_m1", "Attention")}
_SHIFTS = {("mlx_lm.models.rwkv7", "TokenShift")}
_OWN = {("mlx_lm.models.rwkv7", "Rwkv7TimeMixing"): "_wkv7"}
