"""Quantized weights made plain, in memory that all products use in turn."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda import ReferenceKernel, failing, is_left_out, works
from tests.support.emulated import EmulatedKernel
from treadle.runner.fused.dequantize import Dequantizer, dequantizer


def weights(outputs: int, columns: int, bits: int, group: int, dtype: Any = mx.float16) -> tuple[Any, Any, Any]:
    return mx.quantize(mx.random.normal((outputs, columns)).astype(dtype), group_size=group, bits=bits)


@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 32, mx.float16), (4, 64, mx.bfloat16), (8, 128, mx.float16)])
def test_weights_are_mlxs_own_made_plain_and_x_is_itself(bits: int, group: int, dtype: Any) -> None:
    """Fewer rows than outputs, and more; one product after the other, to the last bit but rounding."""
    mx.random.seed(bits)
    some = [weights(outputs, columns, bits, group, dtype) for outputs, columns in ((24, 384), (300, 128), (9, 256))]
    made = Dequantizer(EmulatedKernel)
    assert all(made.takes(weight, scales, bits) for weight, scales, _ in some)
    for rows, one in zip((3, 70, 500), some, strict=True):
        columns = one[0].shape[1] * 32 // bits
        x = mx.random.normal((rows, columns)).astype(dtype)
        same, plain = made(x, *one, bits, group)
        mx.eval(same)
        assert mx.array_equal(same, x).item()
        scales, biases = (part.astype(mx.float32) for part in one[1:])
        wanted = mx.dequantize(one[0], scales, biases, group_size=group, bits=bits)
        epsilon = 2**-10 if dtype == mx.float16 else 2**-7
        np.testing.assert_allclose(
            np.array(plain.astype(mx.float32)), np.array(wanted), rtol=epsilon, atol=epsilon * 0.01
        )


def test_all_use_the_same_memory_as_much_as_the_largest_needs() -> None:
    made, some = Dequantizer(ReferenceKernel), [weights(8 * n, 128, 4, 64) for n in (1, 5, 3)]
    assert all(made.takes(weight, scales, 4) for weight, scales, _ in some)
    first = made(mx.zeros((1, 128), mx.float16), *some[1], 4, 64)[1]
    mx.eval(first)
    before = np.array(first, copy=False).ctypes.data
    other = made(mx.zeros((1, 128), mx.float16), *some[2], 4, 64)[1]
    assert np.array(other, copy=False).ctypes.data == before
    assert other.shape == (24, 128)


def test_what_it_does_not_know_is_not_taken() -> None:
    made = Dequantizer(ReferenceKernel)
    assert not made.takes(*weights(8, 128, 6, 64)[:2], 6)
    assert not made.takes(*weights(8, 128, 4, 64, mx.float32)[:2], 4)
    assert made.takes(*weights(8, 128, 4, 64)[:2], 4)
    assert not made.takes(*weights(8, 128, 4, 64, mx.bfloat16)[:2], 4)


class Idle(ReferenceKernel):
    """Leaves the memory as it is."""

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [inputs[0]]


@pytest.mark.parametrize(
    ("kernel", "why"), [(failing("dequantize").kernel, "no kernel dequantize today"), (Idle, "weights of 4 bits")]
)
def test_one_that_fails_is_left_out_with_one_warning(kernel: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    is_left_out(lambda: dequantizer(kernel), why, caplog)


@pytest.mark.parametrize("kernel", [ReferenceKernel, EmulatedKernel])
def test_one_that_works_is_used(kernel: Any) -> None:
    assert works(dequantizer(kernel))
