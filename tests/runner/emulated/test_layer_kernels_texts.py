"""The text of the kernels between a decoder layer's products, against float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.runner.emulated.test_pool_texts import PAGE, filled, random, slots, twins
from tests.runner.emulated.twins import close
from tests.support.cuda import ReferenceKernel
from tests.support.emulated import EmulatedKernel, host, shuffled
from treadle.runner.fused.kernels import Heads, LayerKernels, Table

ROUNDED = {mx.bfloat16: 1.01 * 2**-8, mx.float16: 1.01 * 2**-11}
"""What rounding once may be off by, of the number."""
REAL, PLAIN = LayerKernels(shuffled(EmulatedKernel, 1)), LayerKernels(ReferenceKernel)


def wide(array: Any) -> Any:
    return array.astype(mx.float32)


@pytest.mark.parametrize(
    ("bits", "group", "width", "dtype"),
    [(16, 64, 1096, mx.bfloat16), (8, 128, 1152, mx.float16), (4, 64, 192, mx.bfloat16)],
)
def test_tokens_get_their_lines_of_the_table(bits: int, group: int, width: int, dtype: Any) -> None:
    """Each number is rounded once."""
    weight, tokens = random(1, 50, width).astype(dtype), mx.array([49, 0, 7, 7, 31], mx.int32)
    parts: tuple[Any, Any, Any] = (
        (weight, weight, weight) if bits == 16 else mx.quantize(weight, group_size=group, bits=bits)
    )
    found = REAL.embed(tokens, Table(*parts, width, bits, group))
    assert found.dtype == dtype
    codes, scales, biases = (part if part.dtype == mx.uint32 else wide(part) for part in parts)
    wanted = np.array(PLAIN.embed(tokens, Table(codes, scales, biases, width, bits, group)))
    np.testing.assert_allclose(np.array(wide(found)), wanted, rtol=ROUNDED[dtype], atol=1e-6)


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
    ],
)
def test_queries_and_keys_are_turned_and_keys_and_values_put_at_their_slots(
    heads: Heads, dtype: Any, bits: int, norm: bool
) -> None:
    """Values exactly; what was in other slots stays."""
    at = slots(3)
    qkv = (random(1, at.shape[0], (heads.queries + 2 * heads.kv) * heads.dim) * 2).astype(dtype)
    of_queries, of_keys = ((1 + random(i, heads.dim) / 4).astype(dtype) if norm else None for i in (2, 3))
    cos_sin = PLAIN.cos_sin(
        mx.arange(at.shape[0]) * 7, mx.array(np.geomspace(1, 1e-4, heads.dim // 2, dtype=np.float32))
    )
    real, plain = twins(1, heads.kv, heads.dim, dtype, bits)
    found, wanted = filled(real, 1), filled(plain, 1)
    q = REAL.rotate(qkv, of_queries, of_keys, 1e-5, cos_sin, at, found, heads)
    wide_norms = [None if one is None else wide(one) for one in (of_queries, of_keys)]
    close(
        q, PLAIN.rotate(wide(qkv), wide_norms[0], wide_norms[1], 1e-5, cos_sin, at, wanted, heads), 4 * ROUNDED[dtype]
    )
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
    h, y = REAL.add_norm(x, r, weight, 1e-5)
    wanted_h, wanted_y = PLAIN.add_norm(wide(x), wide(r), wide(weight), 1e-5)
    close(h, wanted_h, ROUNDED[dtype])
    close(y, wanted_y, 4 * ROUNDED[dtype])


@pytest.mark.parametrize(("width", "dtype"), [(136, mx.bfloat16), (344, mx.float16)])
def test_gates_are_passed(width: int, dtype: Any) -> None:
    both = (random(1, 5, 2 * width) * 3).astype(dtype)
    close(REAL.swiglu(both), PLAIN.swiglu(wide(both)), 3 * ROUNDED[dtype])
