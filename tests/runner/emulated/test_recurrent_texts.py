"""The text of the kernels for recurrent layers, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.recurrent import references
from tests.runner.recurrent.families import new_model
from tests.runner.recurrent.passes import SLOTS, begun, compare, random, segments
from tests.runner.recurrent.references import wide
from tests.support.emulated import EmulatedKernel, shuffled
from treadle.runner.kv.backend import Unsupported
from treadle.runner.mlxlm import RecurrentState, connect
from treadle.runner.recurrent.kernels import RecurrentKernels, Tiling
from treadle.runner.recurrent.mixing import Mixing
from treadle.runner.recurrent.step import Norm

OWN = segments(1, 19, 1, 5, 8, fresh=(1, 2), padding=2, splits={1: 11, 3: 1, 4: 4})
TOKENS = 36
TOLERANCE = {mx.float32: 2e-5, mx.bfloat16: 0.02, mx.float16: 0.003}


def kernels(seed: int = 0, tiling: Tiling | None = None) -> RecurrentKernels:
    return type("Shuffled", (RecurrentKernels,), {"kernel": shuffled(EmulatedKernel, seed)})(tiling)


def copied(array: Any) -> Any:
    """An array with memory of its own."""
    own = mx.array(np.array(array.astype(mx.float32))).astype(array.dtype)
    mx.eval(own)
    return own


def parts(numbers: np.random.Generator, dtype: Any, *shapes: tuple[int, ...]) -> list[Any]:
    """Arrays (T, 1, *shape) side by side in one, as a model splits them from a product's outputs."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    whole = random(numbers, TOKENS, 1, sum(sizes), dtype=dtype)
    split = mx.split(whole, np.cumsum(sizes)[:-1].tolist(), axis=-1)
    return [part.reshape(TOKENS, 1, *shape) for part, shape in zip(split, shapes, strict=True)]


def rows(array: Any, place: slice) -> Any:
    return wide(array[place])[:, 0]


@pytest.mark.parametrize(
    ("heads", "groups", "values", "keys", "dtype", "tiling", "bound"),
    [
        *[(4, 2, 16, 16, mx.float32, None, None), (2, 1, 40, 64, mx.bfloat16, None, None)],
        *[(1, 1, 128, 128, mx.bfloat16, None, None), (2, 2, 24, 128, mx.float16, Tiling(8, 2, 4), -5.0)],
        *[(1, 1, 8, 192, mx.float32, None, None), (2, 1, 20, 12, mx.float32, Tiling(1, 1, 16), None)],
    ],
)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_the_gated_delta_rule(
    heads: int,
    groups: int,
    values: int,
    keys: int,
    dtype: Any,
    tiling: Tiling | None,
    bound: float | None,
    vector: bool,
    normalized: bool,
) -> None:
    numbers = np.random.default_rng(heads + keys)
    q, k, v, b = parts(numbers, dtype, (groups, keys), (groups, keys), (heads, values), (heads,))
    norm = Norm(keys**-0.5, 1e-6) if normalized else None
    if norm is None:
        q, k = (mx.fast.rms_norm(x, None, 1e-6) * keys**-0.5 for x in (q, k))
    gate = (heads, keys) if vector else (heads,)
    (a,) = parts(numbers, dtype, gate)
    a_log, bias = random(numbers, heads, *([1] if vector else [])), random(numbers, *gate)
    pool = random(numbers, SLOTS, heads, values, keys)
    before = copied(pool)
    out = kernels(1, tiling).gated_delta(
        q, k, v, a, b, a_log, bias, pool, begun(OWN, 2), lower_bound=bound, largest_beta=2.0, norm=norm
    )
    if norm is not None:
        q, k = (x.astype(mx.float32) for x in (q, k))
        q, k = (x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        q = q * keys**-0.5
    assert out.dtype == dtype
    assert out.shape == v.shape
    logs, beta = references.delta_gates(wide(a), wide(b), wide(a_log), wide(bias), bound, 2.0)
    compare(
        OWN,
        before,
        pool,
        out,
        lambda at, state: references.delta(
            rows(q, at), rows(k, at), rows(v, at), logs[at][:, 0], beta[at][:, 0], state
        ),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("heads", "groups", "values", "keys", "dtype"),
    [(4, 2, 16, 16, mx.float32), (3, 1, 64, 128, mx.bfloat16), (2, 2, 8, 256, mx.float32)],
)
def test_mamba_2(heads: int, groups: int, values: int, keys: int, dtype: Any, seed: int) -> None:
    numbers = np.random.default_rng(heads + keys)
    x, b, c, dt = parts(numbers, dtype, (heads, values), (groups, keys), (groups, keys), (heads,))
    a_log, bias, skip = (random(numbers, heads) for _ in range(3))
    pool = random(numbers, SLOTS, heads, values, keys)
    before, limits = copied(pool), (0.3, 1.5)
    out = kernels(seed).selective(x, a_log, b, c, skip.astype(dtype), dt, bias, pool, begun(OWN), limits=limits)
    steps = np.clip(references.softplus(wide(dt) + wide(bias)), *limits)
    logs = -np.exp(wide(a_log)) * steps

    def reference(at: slice, state: Any) -> tuple[Any, Any]:
        moved = rows(x, at) * steps[at][:, 0, :, None]
        y, state = references.linear(rows(c, at), rows(b, at), moved, logs[at][:, 0], state)
        return y + wide(skip.astype(dtype))[:, None] * rows(x, at), state

    compare(OWN, before, pool, out, reference, TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "kept"), [(mx.float32, mx.float32), (mx.bfloat16, mx.bfloat16)])
@pytest.mark.parametrize(("channels", "size"), [(40, 16), (130, 8)])
def test_mamba_1(channels: int, size: int, dtype: Any, kept: Any) -> None:
    numbers = np.random.default_rng(channels)
    x, dt, b, c = parts(numbers, dtype, (channels,), (channels,), (size,), (size,))
    dt, a_log = mx.abs(dt) * 0.3, random(numbers, channels, size)
    pool = random(numbers, SLOTS, channels, size, dtype=kept)
    before = copied(pool)
    out = kernels().channels(x, dt, a_log, b, c, pool, begun(OWN))
    compare(
        OWN,
        before,
        pool,
        out,
        lambda at, state: references.channels(rows(x, at), rows(dt, at), wide(a_log), rows(b, at), rows(c, at), state),
        TOLERANCE[dtype],
    )


def test_lightning_attention() -> None:
    numbers = np.random.default_rng(0)
    q, k, v = (random(numbers, TOKENS, 3, 1, 32).transpose(0, 2, 1, 3) for _ in range(3))
    logs, pool = -mx.abs(random(numbers, 3)), random(numbers, SLOTS, 3, 32, 32)
    before = copied(pool)
    out = kernels().lightning(q, k, v, logs, pool, begun(OWN), scale=0.25)
    compare(
        OWN,
        before,
        pool,
        out,
        lambda at, state: references.linear(
            rows(q, at) * 0.25, rows(k, at), rows(v, at), np.repeat(wide(logs)[None], at.stop - at.start, 0), state
        ),
        TOLERANCE[mx.float32],
    )


@pytest.mark.parametrize("width", [2, 3, 4, 7])
@pytest.mark.parametrize(("dtype", "bias"), [(mx.float32, False), (mx.bfloat16, True)])
def test_convolutions(width: int, dtype: Any, bias: bool) -> None:
    numbers = np.random.default_rng(width)
    x, weight = random(numbers, TOKENS, 1, 72, dtype=dtype), random(numbers, 72, width, 1, dtype=dtype)
    more = random(numbers, 72, dtype=dtype) if bias else None
    pool = random(numbers, SLOTS, width - 1, 72, dtype=dtype)
    before = copied(pool)
    out = kernels(1).convolve(x, weight, more, pool, begun(OWN))
    compare(
        OWN,
        before,
        pool,
        out,
        lambda at, state: references.convolution(
            rows(x, at), wide(weight)[:, :, 0], None if more is None else wide(more), state
        ),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize(("dtype", "bias", "silu"), [(mx.float32, False, True), (mx.bfloat16, True, False)])
def test_convolutions_of_a_products_outputs(pools: int, dtype: Any, bias: bool, silu: bool) -> None:
    """Of columns in any order, beside others that are passed on, with states in one pool or several, between gates."""
    numbers, channels, width = np.random.default_rng(pools), 24, 3
    x = random(numbers, TOKENS, 90, dtype=dtype)
    weight = random(numbers, channels, width, 1, dtype=dtype)
    more = random(numbers, channels, dtype=dtype) if bias else None
    columns = numbers.permutation(60)[: channels + 5].astype(np.int32)
    mixing = Mixing(mx.array(columns), weight, more, silu, None if silu else (60, 64))
    kept = [random(numbers, SLOTS, width - 1, channels // pools, dtype=dtype) for _ in range(pools)]
    before = copied(mx.concatenate(kept, axis=-1))
    out = kernels(1).mix(x, mixing, kept, begun(OWN))
    inputs = wide(mixing.inputs(x)[0])[:, 0]

    def reference(at: slice, state: Any) -> tuple[Any, Any]:
        y, state = references.convolution(
            inputs[at], wide(weight)[:, :, 0], None if more is None else wide(more), state
        )
        y = y * references.sigmoid(y) if silu else y * wide(x)[at, 64 : 64 + channels]
        return y, state

    assert out.shape == (TOKENS, 1, channels + 5)
    after = mx.concatenate(kept, axis=-1)
    compare(OWN, before, after, out[..., :channels], reference, TOLERANCE[dtype])
    real = TOKENS - OWN[-1].count
    np.testing.assert_array_equal(wide(out)[:real, 0, channels:], wide(x)[:real, columns[channels:]])


@pytest.mark.parametrize(("dim", "arrays"), [(6, 2), (3000, 2)])
def test_states_that_do_not_fit_are_named(dim: int, arrays: int) -> None:
    with pytest.raises(Unsupported, match=str(dim)):
        Tiling.of(dim, arrays=arrays)


@pytest.mark.parametrize("dim", [4, 8, 16, 24, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("arrays", [2, 3])
def test_rows_are_divided_evenly(dim: int, arrays: int) -> None:
    tiling = Tiling.of(dim, arrays=arrays)
    assert dim % (4 * tiling.lanes) == 0
    assert 32 % tiling.lanes == 0


@pytest.mark.parametrize("family", ["qwen3_5", "mamba", "lfm2"])
def test_states_of_models_are_taken(family: str) -> None:
    for states in connect().recurrent_states(new_model(family)):
        for state in states or ():
            RecurrentKernels.check(state)


@pytest.mark.parametrize("state", [RecurrentState((4, 8, 6), mx.float32), RecurrentState((4, 8, 8), mx.int32)])
def test_states_that_the_kernels_cannot_keep_are_refused(state: RecurrentState) -> None:
    with pytest.raises(Unsupported):
        RecurrentKernels.check(state)
