"""The text of the kernels between a decoder layer's products, against float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.emulated.test_pool_texts import PAGE, filled, random, slots, twins
from tests.runner.emulated.twins import close
from tests.support.cuda import ReferenceKernel
from tests.support.emulated import EmulatedKernel, host, shuffled
from treadle.runner.fused.kernels import Activation, HeadNorms, Heads, LayerKernels, Residual, Table, Weighted
from treadle.runner.fused.norms import Norm

ROUNDED = {mx.bfloat16: 1.01 * 2**-8, mx.float16: 1.01 * 2**-11}
"""What rounding once may be off by, of the number."""
REAL, PLAIN = LayerKernels(shuffled(EmulatedKernel, 1)), LayerKernels(ReferenceKernel)


def wide(array: Any) -> Any:
    return array.astype(mx.float32)


@pytest.mark.parametrize(
    ("bits", "group", "width", "dtype", "scale"),
    [(16, 64, 1096, mx.bfloat16, 1.0), (8, 128, 1152, mx.float16, 1.0), (4, 64, 192, mx.bfloat16, 13.5)],
)
def test_tokens_get_their_lines_of_the_table(bits: int, group: int, width: int, dtype: Any, scale: float) -> None:
    """Each number is rounded once, and once more where it is scaled."""
    weight, tokens = random(1, 50, width).astype(dtype), mx.array([49, 0, 7, 7, 31], mx.int32)
    parts: tuple[Any, Any, Any] = (
        (weight, weight, weight) if bits == 16 else mx.quantize(weight, group_size=group, bits=bits)
    )
    found = REAL.embed(tokens, Table(*parts, width, bits, group, scale))
    assert found.dtype == dtype
    codes, scales, biases = (part if part.dtype == mx.uint32 else wide(part) for part in parts)
    wanted = np.array(PLAIN.embed(tokens, Table(codes, scales, biases, width, bits, group, scale)))
    tolerance = ROUNDED[dtype] * (1 if scale == 1 else 2)
    np.testing.assert_allclose(np.array(wide(found)), wanted, rtol=tolerance, atol=1e-6)


def test_angles_are_cosines_and_sines() -> None:
    positions = mx.array([0, 1, 5, 4000, 131071, 17, 3], mx.int32)
    inv_freq = mx.array((10000.0 ** -(np.arange(32) / 32)).astype(np.float32))
    cos_sin = np.array(positions).astype(np.float32)[:, None] * np.array(inv_freq)
    wanted = np.stack([np.cos(cos_sin.astype(np.float64)), np.sin(cos_sin.astype(np.float64))], axis=-1)
    np.testing.assert_allclose(np.array(REAL.cos_sin(positions, inv_freq)), wanted, atol=3e-7)


@pytest.mark.parametrize(
    ("heads", "dtype", "bits", "norm"),
    [
        (Heads(4, 2, 64, PAGE), mx.bfloat16, 16, True),
        (Heads(3, 1, 128, PAGE), mx.float16, 16, False),
        (Heads(2, 2, 256, PAGE), mx.bfloat16, 8, True),
        (Heads(5, 1, 128, PAGE), mx.float16, 8, False),
        (Heads(3, 1, 128, PAGE, gated=True), mx.bfloat16, 16, True),
    ],
)
def test_queries_and_keys_are_turned_and_keys_and_values_put_at_their_slots(
    heads: Heads, dtype: Any, bits: int, norm: bool
) -> None:
    """Values exactly; what was in other slots stays."""
    at = slots(3)
    qkv = (random(1, at.shape[0], heads.stored * heads.dim) * 2).astype(dtype)
    of_queries, of_keys = ((1 + random(i, heads.dim) / 4).astype(dtype) if norm else None for i in (2, 3))
    cos_sin = PLAIN.cos_sin(
        mx.arange(at.shape[0]) * 7, mx.array(np.geomspace(1, 1e-4, heads.dim // 2, dtype=np.float32))
    )
    real, plain = twins(1, heads.kv, heads.dim, dtype, bits)
    found, wanted = filled(real, 1), filled(plain, 1)
    q = REAL.rotate(qkv, HeadNorms(of_queries, of_keys, 1e-5), cos_sin, at, found, heads)
    wide_norms = HeadNorms(wide(of_queries), wide(of_keys), 1e-5) if norm else HeadNorms()
    close(q, PLAIN.rotate(wide(qkv), wide_norms, cos_sin, at, wanted, heads), 4 * ROUNDED[dtype])
    if bits == 16:
        close(found.data, wanted.data, 4 * ROUNDED[dtype])
        np.testing.assert_array_equal(host(wide(found.data))[:, 1], host(wanted.data)[:, 1])
        return
    np.testing.assert_array_equal(host(found.data)[:, 1], host(wanted.data)[:, 1])
    np.testing.assert_array_equal(host(found.scales)[:, 1], host(wanted.scales)[:, 1])
    close(found.scales, wanted.scales, 4 * ROUNDED[dtype])
    assert np.abs(host(found.data).astype(int) - host(wanted.data)).max() <= 1


@pytest.mark.parametrize(("width", "dtype"), [(4168, mx.bfloat16), (264, mx.float16)])
def test_sums_are_normed(width: int, dtype: Any) -> None:
    """Of widths that the threads' inv_freq do not end with."""
    x, r, weight = random(1, 3, width).astype(dtype), random(2, 3, width).astype(dtype), random(3, width).astype(dtype)
    h, y = REAL.add_norm(x, r, Norm(None, weight, None, 1e-5))
    wanted_h, wanted_y = PLAIN.add_norm(wide(x), wide(r), Norm(None, wide(weight), None, 1e-5))
    close(h, wanted_h, ROUNDED[dtype])
    close(y, wanted_y, 4 * ROUNDED[dtype])


@pytest.mark.parametrize(
    ("heads", "rotated", "interleaved", "dtype", "bits", "norms"),
    [
        (Heads(2, 1, 80, PAGE), 32, False, mx.float16, 16, ""),
        (Heads(2, 1, 96, PAGE), 96, True, mx.bfloat16, 8, "each"),
        (Heads(2, 2, 128, PAGE), 64, False, mx.bfloat16, 16, "whole"),
        (Heads(3, 1, 64, PAGE), 64, True, mx.float16, 16, "each"),
        (Heads(2, 1, 64, PAGE, shared=True), 64, False, mx.bfloat16, 16, "values"),
        (Heads(2, 1, 128, PAGE), 0, False, mx.float16, 16, "each"),
    ],
)
def test_heads_are_rotated_in_parts_or_interleaved_and_normed_together(
    heads: Heads, rotated: int, interleaved: bool, dtype: Any, bits: int, norms: str
) -> None:
    at = slots(3)
    qkv = (random(1, at.shape[0], heads.stored * heads.dim) * 2).astype(dtype)
    counts = (heads.queries, heads.kv) if norms == "whole" else (1, 1)
    parts = [(1 + random(i, n * heads.dim) / 4).astype(dtype) for i, n in enumerate(counts, 2)] if norms else []
    of: dict[str, Any] = {"eps": 1e-5, "whole": norms == "whole", "values": norms == "values"}
    inv_freq = mx.array(np.geomspace(1, 1e-4, max(1, rotated // 2), dtype=np.float32))
    cos_sin = PLAIN.cos_sin(mx.arange(at.shape[0]) * 7, inv_freq, 1.25) if rotated else None
    real, plain = twins(1, heads.kv, heads.dim, dtype, bits)
    found, wanted = filled(real, 1), filled(plain, 1)
    q = REAL.rotate(qkv, HeadNorms(*parts, **of), cos_sin, at, found, heads, interleaved=interleaved)
    in_full = HeadNorms(*map(wide, parts), **of)
    expected = PLAIN.rotate(wide(qkv), in_full, cos_sin, at, wanted, heads, interleaved=interleaved)
    close(q, expected, 5 * ROUNDED[dtype])
    if bits == 16:
        close(found.data, wanted.data, 5 * ROUNDED[dtype])
    else:
        assert np.abs(host(found.data).astype(int) - host(wanted.data)).max() <= 1


def test_rotations_are_scaled() -> None:
    positions, inv_freq = mx.array([3, 70]), mx.array([1.0, 0.25])
    once, twice = (np.array(REAL.cos_sin(positions, inv_freq, scale)) for scale in (1.0, 2.0))
    np.testing.assert_array_equal(2 * once, twice)


@pytest.mark.parametrize(
    ("post", "norm", "residual", "parallel", "dtype", "width"),
    [
        ("", "layer", Residual(), True, mx.bfloat16, 520),
        ("", "layer bias", Residual(multiplier=0.25), False, mx.float16, 520),
        ("rms", "", Residual(), False, mx.float16, 4168),
        ("rms", "rms", Residual(output=0.75, clipped=True), False, mx.bfloat16, 4168),
        ("layer bias", "layer bias", Residual(), False, mx.bfloat16, 520),
    ],
)
def test_branches_are_normed_scaled_and_added_in_every_way(
    post: str, norm: str, residual: Residual, parallel: bool, dtype: Any, width: int
) -> None:
    def made(kind: str, seed: int) -> Norm | None:
        weight, bias = ((1 + random(seed + i, width) / 4).astype(dtype) for i in (0, 1))
        return Norm(None, weight, bias if "bias" in kind else None, 1e-5, "layer" in kind) if kind else None

    def in_full(one: Norm | None) -> Norm | None:
        if one is None:
            return None
        return replace(one, weight=wide(one.weight), bias=None if one.bias is None else wide(one.bias))

    x, r, other = (random(i, 3, width).astype(dtype) for i in (1, 2, 3))
    residual, before, after = replace(residual, post=made(post, 5)), made(post, 5), made(norm, 7)
    found = REAL.add_norm(x, r, after, residual, other if parallel else None)
    plain = replace(residual, post=in_full(before))
    expected = PLAIN.add_norm(wide(x), wide(r), in_full(after), plain, wide(other) if parallel else None)
    for one, wanted in zip(found, expected, strict=True):
        close(one, wanted, 8 * ROUNDED[dtype])


@pytest.mark.parametrize(("dtype", "width", "more"), [(mx.bfloat16, 520, 2), (mx.float16, 4168, 0)])
@pytest.mark.parametrize("lines", [(3, 0), (0, 2)])
def test_experts_are_added_up_and_branches_normed_apart(
    dtype: Any, width: int, more: int, lines: tuple[int, int]
) -> None:
    """And sums are normalized by several weights."""
    weights = [(1 + random(i, width) / 4).astype(dtype) for i in range(4, 8 + more)]
    norms = [Norm(None, weight, eps=1e-5) for weight in weights]
    plain = [Norm(None, wide(weight), eps=1e-5) for weight in weights]
    x, branches, in_full = random(1, 3, width).astype(dtype), [], []
    for i, count in enumerate(lines):
        y = random(2 + i, 3, *([count] if count else []), width).astype(dtype)
        shares = mx.abs(random(9, 3, count)) if count else None
        branches.append(y if shares is None else Weighted(y, shares))
        in_full.append(wide(y) if shares is None else Weighted(wide(y), shares))
    found = REAL.add_norm(
        x, branches[0], norms[3], Residual(norms[2], branch=norms[0], other=norms[1]), branches[1], norms[4:]
    )
    wanted = PLAIN.add_norm(
        wide(x), in_full[0], plain[3], Residual(plain[2], branch=plain[0], other=plain[1]), in_full[1], plain[4:]
    )
    assert len(found) == 2 + more
    for one, expected in zip(found, wanted, strict=True):
        close(one, expected, 12 * ROUNDED[dtype])


def test_sums_beyond_float16_are_clipped_where_the_model_does_that() -> None:
    x = mx.full((1, 64), 60000.0, mx.float16)
    h, _ = REAL.add_norm(x, x, None, Residual(clipped=True))
    assert mx.array_equal(h, mx.full((1, 64), 65504.0, mx.float16)).item()


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("width", "dtype", "gated"), [(136, mx.bfloat16, True), (344, mx.float16, False)])
def test_activations_are_computed(activation: Activation, width: int, dtype: Any, gated: bool) -> None:
    x = (random(1, 5, (2 if gated else 1) * width) * 3).astype(dtype)
    found, expected = (
        kernels.activate(array, activation, gated=gated) for kernels, array in ((REAL, x), (PLAIN, wide(x)))
    )
    close(found, expected, 3 * ROUNDED[dtype])
