"""Quantized weights made plain, in memory that all products use in turn."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda import ReferenceKernel, failing, is_left_out, works
from tests.support.emulated import EmulatedKernel
from treadle.runner.fused.dequantize import Dequantizer, dequantizer
from treadle.runner.fused.quantization import AFFINE, Quantization
from treadle.runner.fused.workspace import LaunchOrder

WAYS = [
    (Quantization(4, 32), mx.float16),
    (Quantization(4, 64), mx.bfloat16),
    (Quantization(8, 128), mx.float16),
    (Quantization(2, 64), mx.bfloat16),
    (Quantization(3, 32), mx.float16),
    (Quantization(5, 64), mx.bfloat16),
    (Quantization(6, 128), mx.float16),
    (Quantization(4, 32, "mxfp4"), mx.bfloat16),
    (Quantization(8, 32, "mxfp8"), mx.float16),
    (Quantization(4, 16, "nvfp4"), mx.bfloat16),
]


def weights(outputs: int, columns: int, way: Quantization, dtype: Any = mx.float16) -> tuple[Any, Any, Any]:
    return way.quantize(mx.random.normal((outputs, columns)).astype(dtype))


@pytest.mark.parametrize(("way", "dtype"), WAYS, ids=str)
def test_weights_are_mlxs_own_made_plain_and_x_is_itself(way: Quantization, dtype: Any) -> None:
    """Fewer rows than outputs, and more; one product after the other, to the last bit but rounding."""
    mx.random.seed(way.bits)
    some = [weights(outputs, columns, way, dtype) for outputs, columns in ((24, 384), (300, 128), (9, 256))]
    made = Dequantizer(EmulatedKernel)
    assert all(made.takes(weight, way, dtype) for weight, *_ in some)
    for rows, one in zip((3, 70, 500), some, strict=True):
        x = mx.random.normal((rows, way.columns(one[0]))).astype(dtype)
        same, plain = made(x, *one, way)
        mx.eval(same)
        assert mx.array_equal(same, x).item()
        scales, biases = one[1:] if way.mode != AFFINE else (part.astype(mx.float32) for part in one[1:])
        wanted = way.dequantize(one[0], scales, biases, mx.float32)
        epsilon = 2**-10 if dtype == mx.float16 else 2**-7
        np.testing.assert_allclose(
            np.array(plain.astype(mx.float32)), np.array(wanted), rtol=epsilon, atol=epsilon * 0.01
        )


FOUR = Quantization(4, 64)


def test_all_use_the_same_memory_as_much_as_the_largest_needs() -> None:
    made, some = Dequantizer(ReferenceKernel), [weights(8 * n, 128, FOUR) for n in (1, 5, 3)]
    assert all(made.takes(weight, FOUR, mx.float16) for weight, *_ in some)
    first = made(mx.zeros((1, 128), mx.float16), *some[1], FOUR)[1]
    mx.eval(first)
    before = np.array(first, copy=False).ctypes.data
    other = made(mx.zeros((1, 128), mx.float16), *some[2], FOUR)[1]
    assert np.array(other, copy=False).ctypes.data == before
    assert other.shape == (24, 128)


def test_what_it_does_not_know_is_not_taken() -> None:
    made = Dequantizer(ReferenceKernel)
    weight = weights(8, 128, FOUR)[0]
    assert not made.takes(weight, Quantization(1, 64), mx.float16)
    assert not made.takes(weight, FOUR, mx.float32)
    assert made.takes(weight, FOUR, mx.float16)
    assert not made.takes(weight, FOUR, mx.bfloat16)


def test_launches_in_an_order_take_the_result_of_the_one_before() -> None:
    order = LaunchOrder(mx.float16)
    made = Dequantizer(Recording, order)
    weight = weights(8, 128, FOUR)
    assert made.takes(weight[0], FOUR, mx.float16)
    first, y = order.last, mx.ones((3, 8), mx.float16)
    made(mx.zeros((1, 128), mx.float16), *weight, FOUR)
    assert made.used(y) is y
    made(mx.zeros((1, 128), mx.float16), *weight, FOUR)
    assert [after is one for after, one in zip(Recording.after, (first, y), strict=True)] == [True, True]
    order.restart()
    assert order.last is first


class Recording(ReferenceKernel):
    after: ClassVar[list[Any]] = []

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.after.append(inputs[-1])
        return super().__call__(inputs, *args, **kwargs)


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
