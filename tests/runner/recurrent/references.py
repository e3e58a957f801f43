"""Recurrent layers in NumPy, in float64, token by token: what kernels and chunked forms are compared with."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Wide = npt.NDArray[np.float64]


def wide(array: Any) -> Wide:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def softplus(x: Wide) -> Wide:
    return np.logaddexp(0.0, x)


def sigmoid(x: Wide) -> Wide:
    return 1 / (1 + np.exp(-x))


def delta_gates(
    a: Wide, b: Wide, a_log: Wide, dt_bias: Wide, lower_bound: float | None, largest: float
) -> tuple[Wide, Wide]:
    """Logarithms of the decays, and betas."""
    x, rate = a + dt_bias, np.exp(a_log)
    return (lower_bound * sigmoid(rate * x) if lower_bound is not None else -rate * softplus(x)), largest * sigmoid(b)


def delta(q: Wide, k: Wide, v: Wide, logs: Wide, beta: Wide, state: Wide) -> tuple[Wide, Wide]:
    """Outputs (n, Hv, Dv) and the state (Hv, Dv, Dk) behind `state`; logs are (n, Hv) or (n, Hv, Dk)."""
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    made, state = [], state.copy()
    for t in range(len(q)):
        state *= np.exp(logs[t])[:, None, None] if logs.ndim == 2 else np.exp(logs[t])[:, None, :]
        off = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state += off[:, :, None] * k[t][:, None, :]
        made.append(np.einsum("hvk,hk->hv", state, q[t]))
    return np.array(made), state


def linear(q: Wide, k: Wide, v: Wide, logs: Wide, state: Wide) -> tuple[Wide, Wide]:
    """The same without the delta rule."""
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    made, state = [], state.copy()
    for t in range(len(q)):
        state = state * np.exp(logs[t])[:, None, None] + v[t][:, :, None] * k[t][:, None, :]
        made.append(np.einsum("hvk,hk->hv", state, q[t]))
    return np.array(made), state


def channels(x: Wide, dt: Wide, a_log: Wide, b: Wide, c: Wide, state: Wide) -> tuple[Wide, Wide]:
    """Mamba 1: outputs (n, C) and the state (C, N)."""
    made = []
    for t in range(len(x)):
        state = state * np.exp(-np.exp(a_log) * dt[t][:, None]) + (dt[t] * x[t])[:, None] * b[t][None]
        made.append(state @ c[t])
    return np.array(made), state


def convolution(x: Wide, weight: Wide, bias: Wide | None, state: Wide) -> tuple[Wide, Wide]:
    """Outputs (n, C) and the last inputs (width - 1, C); `weight` is (C, width)."""
    width = weight.shape[1]
    both = np.concatenate([state, x])
    made = np.array([(both[t : t + width] * weight.T).sum(axis=0) for t in range(len(x))])
    return made + (0 if bias is None else bias), both[len(x) :]
