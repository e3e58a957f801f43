"""Recurrent layers by MLX's operations: all rows of one token together, and prompts in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device.norm_cpu import normed
from . import chunked
from .mixing import Mixing
from .slot_arrays import SlotArrays
from .step import Norm, Part, RecurrentPass

_Result = tuple[Any, Any]


class RecurrentOperations:
    """What `RecurrentKernels` computes, with the same arguments; pools are `SlotArrays`. States stay in float32. On a
    `cpu` MLX has no norm of one operation, which is compiled instead."""

    def __init__(self, *, cpu: bool = False) -> None:
        self._normed = normed if cpu else _normed

    def new_pool(self, slots: int, shape: Sequence[int], dtype: Any) -> SlotArrays:
        """A pool of `slots` states of `shape`."""
        return SlotArrays(slots, shape, dtype)

    def convolve(self, x: Any, weight: Any, bias: Any | None, pool: SlotArrays, step: RecurrentPass) -> Any:
        """Causal convolution (T, 1, C) of `x` of that shape by `weight` (C, width, 1) and `bias` (C,)."""
        kept, taps = int(weight.shape[1]) - 1, weight.transpose(2, 1, 0)

        def one(x: Any, state: Any) -> _Result:
            both = mx.concatenate([state, x], axis=1)
            return (both * taps).sum(axis=1, keepdims=True), both[:, 1:]

        def several(x: Any, state: Any) -> _Result:
            both = mx.concatenate([state, x], axis=1)
            return _depthwise(both, taps), both[:, both.shape[1] - kept :]

        out = _each(step, pool, [x], one, several)
        return out if bias is None else out + bias

    def mix(self, x: Any, mixing: Mixing, pools: Sequence[SlotArrays], step: RecurrentPass) -> Any:
        """Outputs (T, 1, C + E) of `mixing` for `x` (T, N)."""
        convolved, rest = mixing.inputs(x)
        parts = (mx.split(array, len(pools), axis=axis) for array, axis in ((convolved, -1), (mixing.weight, 0)))
        made = [self.convolve(own, weight, None, pool, step) for own, weight, pool in zip(*parts, pools, strict=True)]
        y = made[0] if len(made) == 1 else mx.concatenate(made, axis=-1)
        return mixing.finished(x, y if mixing.bias is None else y + mixing.bias, rest)

    def gated_delta(
        self,
        q: Any,
        k: Any,
        v: Any,
        a: Any,
        b: Any,
        a_log: Any,
        dt_bias: Any,
        pool: SlotArrays,
        step: RecurrentPass,
        *,
        lower_bound: float | None = None,
        largest_beta: float = 1.0,
        norm: Norm | None = None,
    ) -> Any:
        """Gated delta rule (T, 1, Hv, Dv)."""
        if norm is not None:
            query_scale, key_scale, epsilon = norm.scales
            q = self._normed(q.astype(mx.float32), epsilon, query_scale)
            k = self._normed(k.astype(mx.float32), epsilon, key_scale)
        logs, beta = _delta_gates(lower_bound, largest_beta)(a, b, a_log, dt_bias)
        return _each(step, pool, [q, k, v, logs, beta], _delta_step, _one(chunked.delta)).astype(v.dtype)

    def selective(
        self,
        x: Any,
        a_log: Any,
        b: Any,
        c: Any,
        d: Any,
        dt: Any,
        dt_bias: Any,
        pool: SlotArrays,
        step: RecurrentPass,
        *,
        limits: tuple[float, float],
    ) -> Any:
        """State space model of Mamba 2 (T, 1, H, P)."""
        steps = mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), *limits)
        logs, moved = -mx.exp(a_log.astype(mx.float32)) * steps, x * steps[..., None]
        y = _each(step, pool, [c, b, moved, logs], _linear_step, _one(chunked.linear))
        return (y + x * d[:, None]).astype(x.dtype)

    def channels(self, x: Any, dt: Any, a_log: Any, b: Any, c: Any, pool: SlotArrays, step: RecurrentPass) -> Any:
        """State space model of Mamba 1 (T, 1, C), without the direct path."""
        rates = -mx.exp(a_log.astype(mx.float32))

        def one(x: Any, dt: Any, b: Any, c: Any, state: Any) -> _Result:
            state = state * mx.exp(dt[:, 0, :, None] * rates) + (dt * x)[:, 0, :, None] * b
            return (state @ c.swapaxes(-1, -2)).swapaxes(-1, -2), state

        def several(x: Any, dt: Any, b: Any, c: Any, state: Any) -> _Result:
            y, state = chunked.channels(x[0], dt[0], rates, b[0], c[0], state[0])
            return y[None], state[None]

        return _each(step, pool, [x, dt, b, c], one, several).astype(x.dtype)

    def lightning(
        self, q: Any, k: Any, v: Any, logs: Any, pool: SlotArrays, step: RecurrentPass, *, scale: float
    ) -> Any:
        """Lightning attention (T, 1, H, Dv)."""
        logs = mx.broadcast_to(logs, v.shape[:3])
        y = _each(step, pool, [q * scale, k, v, logs], _linear_step, _one(chunked.linear))
        return y.astype(v.dtype)

    def apply(
        self, function: Callable[..., _Result], arrays: Sequence[Any], pool: SlotArrays, step: RecurrentPass
    ) -> Any:
        """Outputs (T, 1, ...) of a model's own `function` of `arrays` (n, L, ...) and states (n, ...), which returns
        outputs of the same axes and the states behind them."""
        return _each(step, pool, arrays, function, function)


def _each(
    step: RecurrentPass,
    pool: SlotArrays,
    arrays: Sequence[Any],
    one: Callable[..., _Result],
    several: Callable[..., _Result],
) -> Any:
    """Outputs (T, 1, ...) of a step. `one` gets rows of one token (n, 1, ...) with their states (n, ...), `several` a
    segment (1, n, ...) with its state (1, ...); both return outputs of the same axes, and the states behind them."""
    made = []
    for run in step.runs:
        states = pool.read([segment.source for segment in run.segments])
        for part in run.parts:
            single = run.singles or part.length == 1
            own = [_part(array, part, step.count, single=single) for array in arrays]
            y, states = (one if single else several)(*own, states)
            pool.write(part.targets, states.astype(pool.dtype))
            made.append(y if single else y.swapaxes(0, 1))
    return made[0] if len(made) == 1 else mx.concatenate(made)


def _part(array: Any, part: Part, count: int, *, single: bool) -> Any:
    own = array if part.length == count else array[part.first : part.first + part.length]
    return own if single else own.swapaxes(0, 1)


def _one(form: Callable[..., _Result]) -> Callable[..., _Result]:
    """A chunked form for arrays and a state with an axis of one sequence before them."""

    def several(*arrays: Any) -> _Result:
        y, state = form(*(array[0] for array in arrays[:-1]), arrays[-1][0].astype(mx.float32))
        return y[None], state[None]

    return several


def _normed(x: Any, eps: float, scale: float) -> Any:
    return mx.fast.rms_norm(x, None, eps) * scale


@cache
def _delta_gates(lower_bound: float | None, largest_beta: float) -> Callable[..., _Result]:
    """A function that makes the logarithms of decays and the betas of a gated delta rule."""

    @partial(mx.compile, shapeless=True)
    def gates(a: Any, b: Any, a_log: Any, dt_bias: Any) -> _Result:
        rates, a = mx.exp(a_log.astype(mx.float32)), a.astype(mx.float32) + dt_bias
        logs = -rates * nn.softplus(a) if lower_bound is None else lower_bound * mx.sigmoid(rates * a)
        return logs, mx.sigmoid(b.astype(mx.float32)) * largest_beta

    return gates


def _delta_step(q: Any, k: Any, v: Any, logs: Any, beta: Any, state: Any) -> _Result:
    heads, outputs, columns = _by_groups(k, v)
    q, k, decays = q.astype(mx.float32), k.astype(mx.float32), _decays(logs, heads)
    whole = state.reshape(*heads, outputs, columns)
    if logs.ndim == 3:
        seen = [_product(whole, k), decays]
    else:
        seen = [whole @ (k.reshape(*heads[:2], 1, columns, 1) * decays.swapaxes(-1, -2))]
    off = _off(v.reshape(*heads, outputs, 1), beta.reshape(*heads, 1, 1), *seen)
    whole = _moved(whole, decays, off, k.reshape(*heads[:2], 1, 1, columns))
    return _product(whole, q).reshape(v.shape), whole.reshape(state.shape)


def _linear_step(q: Any, k: Any, v: Any, logs: Any, state: Any) -> _Result:
    heads, outputs, columns = _by_groups(k, v)
    q, k = q.astype(mx.float32), k.astype(mx.float32)
    whole = state.reshape(*heads, outputs, columns)
    moved = v.reshape(*heads, outputs, 1), k.reshape(*heads[:2], 1, 1, columns)
    whole = _moved(whole, _decays(logs, heads), *moved)
    return _product(whole, q).reshape(v.shape), whole.reshape(state.shape)


_Heads = tuple[int, int, int]
"""Rows, groups, and heads of each group, which share keys and queries."""


def _by_groups(k: Any, v: Any) -> tuple[_Heads, int, int]:
    """The heads of keys (n, 1, groups, Dk) and values (n, 1, H, Dv), Dv and Dk."""
    rows, _, heads, outputs = v.shape
    groups, columns = k.shape[2:]
    return (rows, groups, heads // groups), outputs, columns


def _decays(logs: Any, heads: _Heads) -> Any:
    """Decays (n, groups, H / groups, 1, 1 or Dk). They are made here once a head: a compiled function that had them
    would make them for each number of a state."""
    return mx.exp(logs).reshape(*heads, 1, -1)


def _product(state: Any, x: Any) -> Any:
    """Products (n, groups, H / groups, Dv, 1) of a state (n, groups, H / groups, Dv, Dk) with keys or queries (n, 1,
    groups, Dk): one for all heads of a group."""
    joined = state.reshape(*state.shape[:2], -1, state.shape[-1])
    return (joined @ x.transpose(0, 2, 3, 1)).reshape(*state.shape[:-1], 1)


@partial(mx.compile, shapeless=True)
def _off(v: Any, beta: Any, seen: Any, *decays: Any) -> Any:
    for factor in decays:
        seen = seen * factor
    return (v - seen) * beta


@partial(mx.compile, shapeless=True)
def _moved(state: Any, decays: Any, v: Any, k: Any) -> Any:
    return state * decays + v * k


def _depthwise(x: Any, taps: Any) -> Any:
    """Convolution of each channel of `x` (n, length, C) by `taps` (1, width, C), as sums of shifted products: MLX's own
    computes each channel by itself on a CPU."""
    width = int(taps.shape[1])
    length = x.shape[1] - width + 1
    out = x[:, :length] * taps[:, :1]
    for i in range(1, width):
        out = out + x[:, i : i + length] * taps[:, i : i + 1]
    return out
