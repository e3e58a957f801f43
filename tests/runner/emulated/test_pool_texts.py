"""The text of the kernels that fill a pool's pages, to the bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.emulated.twins import Wide, kernels_of
from tests.support.emulated import host
from treadle.runner.kv.paged.pool import Pool, PoolKernels

PAGE, PAGES, TOKENS = 32, 7, 45
SEEDS = range(2)


def twins(
    seed: int, heads: int, dim: int, dtype: Any, bits: int = 16, **values: Any
) -> tuple[PoolKernels, PoolKernels]:
    """The kernels, and what NumPy makes of them in float32."""
    return kernels_of(seed)(heads, dim, PAGE, dtype, bits, **values), Wide(heads, dim, PAGE, mx.float32, bits, **values)


def random(seed: int, *shape: int) -> Any:
    return mx.array(np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32))


def filled(kernels: PoolKernels, seed: int) -> Pool:
    """A pool with something everywhere."""
    pool, numbers = kernels.new_pool(PAGES), np.random.default_rng(seed)
    if pool.scales is None:
        pool.data[:] = random(seed, *pool.data.shape).astype(mx.float16).astype(mx.bfloat16).astype(pool.data.dtype)
    else:
        pool.data[:] = mx.array(numbers.integers(0, 256, pool.data.shape).astype(np.uint8))
        pool.scales[:] = mx.array(numbers.uniform(0.001, 2, pool.scales.shape).astype(np.float32))
    mx.eval(pool.data, pool.scales)
    return pool


def slots(seed: int) -> Any:
    return mx.array(np.random.default_rng(seed).permutation(PAGES * PAGE)[:TOKENS].astype(np.int32))


def same(found: Pool, wanted: Pool) -> None:
    """To the bit, where no token was written too."""
    wide = found.data if found.scales is not None else found.data.astype(mx.float32)
    np.testing.assert_array_equal(host(wide), host(wanted.data))
    if found.scales is not None:
        np.testing.assert_array_equal(host(found.scales), host(wanted.scales))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "bits"),
    [
        *[(2, 64, mx.bfloat16, 16), (3, 128, mx.float16, 16), (2, 128, mx.bfloat16, 8), (1, 256, mx.float16, 8)],
        *[(2, 80, mx.bfloat16, 16), (3, 80, mx.float16, 8), (2, 96, mx.bfloat16, 8)],
    ],
)
def test_tokens_are_put_at_their_slots(heads: int, dim: int, dtype: Any, bits: int, seed: int) -> None:
    """Of 8 bits with their factors, which are 1 for a token of zeros."""
    real, plain = twins(seed, heads, dim, dtype, bits)
    found, wanted = filled(real, 1), filled(plain, 1)
    keys, values = (random(seed + i, TOKENS, heads, 1, dim) * 3 for i in (2, 3))
    keys[4] = values[5] = 0
    keys, values = keys.astype(dtype), values.astype(dtype)
    real.write(found, keys, values, slots(seed))
    plain.write(wanted, keys.astype(mx.float32), values.astype(mx.float32), slots(seed))
    same(found, wanted)


@pytest.mark.parametrize(
    ("heads", "dim", "values"), [(1, 96, {"value_dim": 64, "latent": True}), (2, 48, {"value_dim": 80})]
)
def test_latents_and_values_of_another_width_are_put_and_copied(heads: int, dim: int, values: dict[str, Any]) -> None:
    """Of latents rotated keys behind them."""
    real, plain = twins(1, heads, dim, mx.bfloat16, **values)
    found, wanted = filled(real, 1), filled(plain, 1)
    widths = (64, 32) if real.latent else (dim, real.value_dim)
    keys, others = (random(i, TOKENS, heads, 1, width).astype(mx.bfloat16) for i, width in enumerate(widths))
    real.write(found, keys, others, slots(1))
    plain.write(wanted, keys.astype(mx.float32), others.astype(mx.float32), slots(1))
    pairs = mx.array([[5, 2]], mx.int32)
    real.copy_pages([found], pairs)
    plain.copy_pages([wanted], pairs)
    same(found, wanted)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bits", [16, 8])
def test_pages_are_copied_over_others_in_all_layers(bits: int, layers: int) -> None:
    """One to two others, and one over itself."""
    real, plain = twins(layers, 3, 64, mx.bfloat16, bits)
    pairs = mx.array([[5, 2], [0, 0], [5, 6]], mx.int32)
    found, wanted = ([filled(kernels, seed) for seed in range(layers)] for kernels in (real, plain))
    real.copy_pages(found, pairs)
    plain.copy_pages(wanted, pairs)
    for pools in zip(found, wanted, strict=True):
        same(*pools)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_pages_of_8_bits_are_made_plain(dtype: Any) -> None:
    """More of them, then fewer, which leaves the others as they are."""
    real, plain = twins(1, 2, 64, dtype, 8)
    pools = filled(real, 1), filled(plain, 1)
    after = mx.zeros(1, mx.int32), mx.zeros(1)
    for chosen in ([3, 0, 6, 3], [1, 2]):
        pages = mx.array(chosen, mx.int32)
        found, _ = real.dequantize(pools[0], pages, *after)
        wanted, _ = plain.dequantize(pools[1], pages, *after)
        np.testing.assert_array_equal(host(found.data), host(wanted.data.astype(dtype)))
