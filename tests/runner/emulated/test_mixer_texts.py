"""The text of the kernels of mixers against NumPy: gates and norms of heads, latents, and products of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.emulated.test_pool_texts import random
from tests.runner.emulated.twins import close
from tests.support.cuda import ReferenceKernel
from tests.support.emulated import EmulatedKernel, host, shuffled
from treadle.runner.fused.head_product import HeadProduct, Rotated
from treadle.runner.fused.mixer_kernels import Gate, Latents, MixerKernels
from treadle.runner.fused.norms import Norm
from treadle.runner.fused.quantization import Quantization
from treadle.runner.kv.paged.pool import Pool

KERNEL = shuffled(EmulatedKernel, 1)
REAL, PLAIN = MixerKernels(KERNEL), MixerKernels(ReferenceKernel)
ROUNDED = {mx.bfloat16: 2**-7, mx.float16: 2**-10}


def wide(array: Any) -> Any:
    return array.astype(mx.float32)


def norm(seed: int, width: int, dtype: Any, eps: float = 1e-5) -> Norm:
    return Norm(None, (1 + random(seed, width) / 4).astype(dtype), eps=eps)


def in_full(one: Norm) -> Norm:
    return Norm(None, wide(one.weight), eps=one.eps)


@pytest.mark.parametrize(
    ("heads", "dim", "normed", "silu", "dtype"),
    [(3, 128, True, True, mx.bfloat16), (2, 48, True, False, mx.float16), (5, 256, False, False, mx.bfloat16)],
)
def test_heads_are_normalized_and_gated(heads: int, dim: int, normed: bool, silu: bool, dtype: Any) -> None:
    """Gates are somewhere among a product's outputs."""
    y, gates = random(1, 7, heads * dim).astype(dtype), (random(2, 7, 2 * heads * dim + 3) * 3).astype(dtype)
    own, places = norm(3, dim, dtype), mx.array([5 + 2 * head * dim - head for head in range(heads)], mx.int32)
    found = REAL.gate_heads(y, Gate(places, silu, own if normed else None), gates, dim)
    wanted = PLAIN.gate_heads(wide(y), Gate(places, silu, in_full(own) if normed else None), wide(gates), dim)
    close(found, wanted, 4 * ROUNDED[dtype])


@pytest.mark.parametrize(
    ("rank", "dims", "rotated", "turns", "interleaved", "dtype"),
    [
        *[(96, 128, 32, True, True, mx.bfloat16), (0, 256, 64, False, False, mx.float16)],
        *[(200, 128, 64, True, False, mx.float16)],
    ],
)
def test_latents_and_keys_go_to_pages(
    rank: int, dims: int, rotated: int, turns: bool, interleaved: bool, dtype: Any
) -> None:
    """What is in other slots stays, and a token without a slot is put nowhere."""
    page, slots = 8, mx.array([17, -1, 3, 4], mx.int32)
    first = rank or 40
    x = random(1, 4, first + dims + rotated + 8).astype(dtype)
    latents = Latents(rank, first, dims, rotated, norm(2, dims, dtype), norm(3, rank or dims, dtype, 1e-6), interleaved)
    plain = replace(latents, norm=in_full(latents.norm), query_norm=in_full(norm(3, rank or dims, dtype, 1e-6)))
    angles = random(4, 4, rotated // 2) * 3
    cos_sin = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1) if turns else None
    pools = [Pool(mx.full((3, page * (dims + rotated)), 7, kind)) for kind in (dtype, mx.float32)]
    mx.eval([pool.data for pool in pools])
    queries, written = REAL.put_latents(x, latents, cos_sin, slots, pools[0])
    wanted, _ = PLAIN.put_latents(wide(x), plain, cos_sin, slots, pools[1])
    assert written.dtype == mx.int32
    assert (queries is x) == (rank == 0)
    if rank:
        close(queries, wanted, 3 * ROUNDED[dtype])
    close(pools[0].data, pools[1].data, 3 * ROUNDED[dtype])
    assert host(pools[1].data).reshape(-1, dims + rotated)[5].tolist() == [7] * (dims + rotated)


PRODUCTS = [
    *[(None, 3, 40, 64, 1, mx.bfloat16), (None, 2, 72, 512, 19, mx.float16), (None, 2, 16, 192, 64, mx.bfloat16)],
    *[(Quantization(4, 64), 2, 40, 128, 9, mx.bfloat16), (Quantization(8, 32), 3, 33, 256, 3, mx.float16)],
    *[(Quantization(4, 32, "mxfp4"), 2, 24, 128, 33, mx.bfloat16), (Quantization(3, 64), 2, 16, 320, 2, mx.float16)],
    *[(Quantization(8, 32, "mxfp8"), 2, 24, 64, 5, mx.bfloat16)],
]


def head_product(way: Quantization | None, heads: int, outputs: int, columns: int, dtype: Any) -> tuple[Any, Any]:
    """The product by the kernel's text, and its weights (H, N, K) in float64."""
    weight = random(1, heads, outputs, columns).astype(dtype)
    if way is None:
        return HeadProduct(weight, None, None, None, KERNEL, dtype), np.array(wide(weight), np.float64)
    parts = way.quantize(weight)
    plain = way.dequantize(*parts, None if way.mode == "affine" else mx.float32)
    return HeadProduct(*parts, way, KERNEL, dtype), np.array(wide(plain), np.float64)


@pytest.mark.parametrize(("way", "heads", "outputs", "columns", "rows", "dtype"), PRODUCTS, ids=str)
def test_each_head_is_multiplied_by_its_weight(
    way: Quantization | None, heads: int, outputs: int, columns: int, rows: int, dtype: Any
) -> None:
    """With dimensions between heads that belong to something else, which are rotated and scaled beside it."""
    product, weight = head_product(way, heads, outputs, columns, dtype)
    first, step, turned = 8, columns + 32, Rotated(columns, 32, 0.5, interleaved=True)
    x = random(2, rows, first + heads * step).astype(dtype)
    assert product._takes(x, first, step)
    own = np.array(wide(x), np.float64)[:, first:].reshape(rows, heads, step)
    expected = np.einsum("mhk,hnk->mhn", own[..., :columns], weight)
    tolerance = ROUNDED[dtype] * np.abs(expected).max()
    angles = random(4, rows, 16) * 3
    cos_sin = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1)
    y, rotated = product.with_rotated(x, first, step, turned, cos_sin)
    for found in (y, product(x, first, step)):
        np.testing.assert_allclose(np.array(wide(found)), expected, atol=tolerance)
    a, b = own[..., columns::2], own[..., columns + 1 :: 2]
    cosine, sine = (np.array(f(angles), np.float64)[:, None] for f in (mx.cos, mx.sin))
    pairs = np.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1).reshape(rows, heads, 32) / 2
    np.testing.assert_allclose(np.array(wide(rotated)), pairs, atol=4 * ROUNDED[dtype])


@pytest.mark.parametrize(("rows", "first", "columns"), [(65, 0, 64), (3, 4, 64), (3, 0, 80)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_other_products_are_mlxs_and_the_rest_is_rotated(
    rows: int, first: int, columns: int, interleaved: bool
) -> None:
    product, weight = head_product(None, 2, 24, columns, mx.float16)
    step, turned = columns + 16, Rotated(columns, 16, 2.0, interleaved)
    x = random(2, rows, first + 2 * step).astype(mx.float16)
    y, rotated = product.with_rotated(x, first, step, turned, None)
    own = np.array(wide(x), np.float64)[:, first:].reshape(rows, 2, step)
    expected = np.einsum("mhk,hnk->mhn", own[..., :columns], weight)
    np.testing.assert_allclose(np.array(wide(y)), expected, atol=2**-9 * np.abs(expected).max())
    np.testing.assert_array_equal(np.array(wide(rotated)), 2 * own[..., columns:])
