"""Recurrences over one sequence's tokens in parallel chunks, with MLX's operations on any device.

In a chunk the tokens act on each other by a triangular matrix, and only the state passes from chunk to chunk. Exponents
are sums of logarithms of decays over a span of tokens, hence never positive: nothing overflows, however strong the
decays. Only where each number of a key decays by itself, factors of rows and of keys are taken from the middle of a
chunk; there they are small enough because chunks are short, and decays below float32's precision are not told apart.

Chunks are of sizes at which OpenBLAS computes each small product in one thread.

Tokens come first: `q` and `k` (n, groups, Dk), `v` (n, H, Dv), `logs` (n, H), logarithms of decays, float32. A state is
(H, Dv, Dk) float32. The results are outputs (n, H, Dv) float32 and the state behind the last token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

_DELTA_CHUNK = 16
_LINEAR_CHUNK = 32
_VECTOR_CHUNK = 8
_PIECE = 512
"""Tokens whose intermediate arrays are in memory together."""
_CHANNEL_PIECE = 16
_LEAST_LOG = -104.0
"""Logarithm of a decay that is zero in float32. Lower ones would take the places of others in sums."""
_LEAST_VECTOR_LOG = -20.0
"""Logarithm of a decay below float32's precision; e to its power times half a chunk is a float32."""
_Result = tuple[Any, Any]


def delta(q: Any, k: Any, v: Any, logs: Any, beta: Any, state: Any) -> _Result:
    """Gated delta rule in its WY form (Yang et al., "Gated Delta Networks", 2024). `beta` is (n, H). `logs` may be (n,
    H, Dk), with a decay for each number of a key."""
    size = _DELTA_CHUNK if logs.ndim == 2 else _VECTOR_CHUNK
    return _in_pieces(lambda *arrays: _delta(size, *arrays), (q, k, v, logs, beta), state)


def linear(q: Any, k: Any, v: Any, logs: Any, state: Any) -> _Result:
    """State-space duality form (Dao and Gu, "Transformers are SSMs", 2024): the state decays, and each token adds the
    outer product of `v` and `k`."""
    return _in_pieces(lambda *arrays: _linear(_LINEAR_CHUNK, *arrays), (q, k, v, logs), state)


def channels(x: Any, dt: Any, rates: Any, b: Any, c: Any, state: Any) -> _Result:
    """State space model of Mamba 1 of `x` (n, C) with steps `dt` (n, C), decays exp(dt `rates`), `rates` (C, N), inputs
    and outputs `b` and `c` (n, N), and a state (C, N). All but a product and a sum for each token is computed for many
    tokens at once; forms with fewer steps compute more, and were not faster for thousands of channels."""
    made = []
    for begin in range(0, int(x.shape[0]), _CHANNEL_PIECE):
        part = slice(begin, begin + _CHANNEL_PIECE)
        y, state = _channels(x[part], dt[part], rates, b[part], c[part], state)
        made.append(y)
    return _joined(made), state


def _in_pieces(run: Callable[..., _Result], arrays: tuple[Any, ...], state: Any) -> _Result:
    made = []
    for begin in range(0, int(arrays[0].shape[0]), _PIECE):
        y, state = run(*(array[begin : begin + _PIECE] for array in arrays), state)
        made.append(y)
    return _joined(made), state


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _delta(size: int, q: Any, k: Any, v: Any, logs: Any, beta: Any, state: Any) -> _Result:
    count, heads = int(v.shape[0]), int(v.shape[1])
    q, k = (_repeated(_chunks(x, size), heads) for x in (q, k))
    v, logs, beta = (_chunks(x, size) for x in (v, logs, beta[..., None]))
    sums, total, within, both = _decays(logs, q, k)
    inverse = _inverse(mx.tril(both(k) * beta, -1))
    updates, seen = inverse @ (v * beta), inverse @ (k * within * beta)
    scores, q, k = mx.tril(both(q)), q * within, k * mx.exp(total - sums)
    return _passed_on(count, q, k, scores, updates, mx.exp(total), state, seen)


def _linear(size: int, q: Any, k: Any, v: Any, logs: Any, state: Any) -> _Result:
    count, heads = int(v.shape[0]), int(v.shape[1])
    size = min(size, count)
    q, k = (_repeated(_chunks(x, size), heads) for x in (q, k))
    v, logs = (_chunks(x, size) for x in (v, logs))
    sums, total, within, both = _decays(logs, q, k)
    scores, q, k = mx.tril(both(q)), q * within, k * mx.exp(total - sums)
    return _passed_on(count, q, k, scores, v, mx.exp(total), state)


def _passed_on(
    count: int, q: Any, k: Any, scores: Any, updates: Any, decays: Any, state: Any, seen: Any | None = None
) -> _Result:
    """Outputs of chunks one after the other. `seen` are the keys by which a chunk's updates depend on the state."""
    state, made, keys = state.swapaxes(-1, -2), [], k.swapaxes(-1, -2)
    decays = decays.swapaxes(-1, -2)
    for i in range(int(q.shape[1])):
        own = updates[:, i] if seen is None else updates[:, i] - seen[:, i] @ state
        made.append(q[:, i] @ state + scores[:, i] @ own)
        state = state * decays[:, i] + keys[:, i] @ own
    y = mx.stack(made, axis=1)
    y = y.reshape(y.shape[0], -1, y.shape[-1])[:, :count]
    return y.swapaxes(0, 1), state.swapaxes(-1, -2)


def _decays(logs: Any, q: Any, k: Any) -> tuple[Any, Any, Any, Callable[[Any], Any]]:
    """The logarithms' sums up to each token, those of the chunk, the decays from the chunk's beginning to each token;
    and a function: products of rows with `k`, each times the decays from the key's token to the row's. They are right
    on the diagonal and below."""
    if logs.shape[-1] == 1:
        sums = mx.cumsum(mx.maximum(logs, _LEAST_LOG), axis=2)
        spans = mx.exp(mx.where(_lower(int(logs.shape[2])), sums - sums.swapaxes(-1, -2), -mx.inf))
        transposed = k.swapaxes(-1, -2)
        return sums, sums[:, :, -1:], mx.exp(sums), lambda rows: rows @ transposed * spans
    sums = mx.cumsum(mx.maximum(logs, _LEAST_VECTOR_LOG), axis=2)
    middle = logs.shape[2] // 2
    factors = sums - sums[:, :, middle : middle + 1]
    transposed, factors = (k * mx.exp(-factors)).swapaxes(-1, -2), mx.exp(factors)
    return sums, sums[:, :, -1:], mx.exp(sums), lambda rows: (rows * factors) @ transposed


def _inverse(below: Any) -> Any:
    """Inverse of I + `below` (..., n, n), strictly lower triangular: of diagonal blocks, each time twice as large."""
    count = int(below.shape[-1])
    inverse = mx.eye(count) - mx.where(_pairs(count, 1), below, 0)
    size = 2
    while size < count:
        inverse = inverse - inverse @ mx.where(_pairs(count, size), below, 0) @ inverse
        size *= 2
    return inverse


@cache
def _lower(count: int) -> Any:
    return mx.tril(mx.ones((count, count), mx.bool_))


@cache
def _pairs(count: int, size: int) -> Any:
    """Mask of the blocks of `size` below the diagonal blocks of `size`, in blocks of twice that."""
    blocks = mx.arange(count) // size
    return (blocks[:, None] == blocks[None] + 1) & (blocks[:, None] % 2 == 1)


def _chunks(array: Any, size: int) -> Any:
    """`array` (n, H[, D]) as (H, chunks, size, D or 1), float32, with zeros behind its end, which change nothing."""
    array = (array if array.ndim == 3 else array[..., None]).astype(mx.float32)
    if more := -array.shape[0] % size:
        array = mx.pad(array, [(0, more), (0, 0), (0, 0)])
    return array.swapaxes(0, 1).reshape(array.shape[1], -1, size, array.shape[2])


def _repeated(array: Any, heads: int) -> Any:
    return array if array.shape[0] == heads else mx.repeat(array, heads // array.shape[0], axis=0)


def _channels(x: Any, dt: Any, rates: Any, b: Any, c: Any, state: Any) -> _Result:
    x, dt, b, c = (one.astype(mx.float32) for one in (x, dt, b, c))
    decays, updates = mx.exp(dt[..., None] * rates), (dt * x)[..., None] * b[:, None]
    states = []
    for decay, update in zip(decays, updates, strict=True):
        state = state * decay + update
        states.append(state)
    return (mx.stack(states) @ c[..., None]).squeeze(-1), state
