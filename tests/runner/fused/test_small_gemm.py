"""Products of dozens of rows: the kernel's own text against float64, and what it is used for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda import ReferenceKernel, failing, is_left_out, works
from tests.support.emulated import EmulatedKernel, shuffled
from treadle.runner.fused.small_gemm import MOST, SmallGemm, small_gemm

SHAPES = [(1, 64, 64), (33, 62, 64), (64, 130, 192), (100, 72, 320), (130, 200, 1024)]
"""Rows, outputs and columns: within a tile and over its ends, of one slice and of more than are on their way."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.bfloat16, 0.004), (mx.float16, 0.0006)])
def test_products_are_what_they_should_be(shape: tuple[int, int, int], seed: int, dtype: Any, tolerance: float) -> None:
    """Within a rounding of the largest, whatever warp and block comes first."""
    rows, outputs, columns = shape
    dice = np.random.default_rng(seed)
    x, weight = (mx.array(dice.normal(0, 1, (n, columns)).astype(np.float32)).astype(dtype) for n in (rows, outputs))
    wide = [np.array(one.astype(mx.float32), np.float64) for one in (x, weight)]
    bias: Any = mx.array(dice.normal(0, 1, outputs).astype(np.float32)).astype(dtype) if seed else None
    wanted = wide[0] @ wide[1].T + (0 if bias is None else np.array(bias.astype(mx.float32)))
    found = np.array(SmallGemm(shuffled(EmulatedKernel, seed))(x, weight, bias).astype(mx.float32))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((64, 128), mx.bfloat16, True),
        ((62, 64), mx.float16, True),
        ((61, 64), mx.float16, False),
        ((64, 96), mx.bfloat16, False),
        ((64, 128), mx.float32, False),
    ],
)
def test_weights_that_it_can_not_read_are_not_taken(shape: tuple[int, int], dtype: Any, taken: bool) -> None:
    assert SmallGemm.takes(*shape, dtype) is taken


def test_more_rows_than_pay_are_left_to_mlx() -> None:
    weight = mx.zeros((512, 1024), mx.float16)
    most = MOST // weight.size
    assert [SmallGemm.pays(rows, weight) for rows in (1, most, most + 1)] == [True, True, False]


@pytest.mark.parametrize("kernel", [ReferenceKernel, EmulatedKernel])
def test_one_that_works_is_used(kernel: Any) -> None:
    assert works(small_gemm(kernel))


class Idle(ReferenceKernel):
    """Multiplies nothing."""

    def __call__(self, *args: Any, shapes: Any, dtypes: Any, **kwargs: Any) -> list[Any]:
        return [mx.zeros(shapes[0], dtypes[0])]


@pytest.mark.parametrize(
    ("kernel", "why"), [(failing("small_gemm").kernel, "no kernel small_gemm today"), (Idle, "not what it should be")]
)
def test_one_that_fails_is_left_out_with_one_warning(kernel: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    is_left_out(lambda: small_gemm(kernel), why, caplog)
