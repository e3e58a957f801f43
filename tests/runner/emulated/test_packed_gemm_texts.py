"""The text of the kernel for products of few rows with weights of any width and mode, against float64."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.emulated import EmulatedKernel, shuffled
from treadle.runner.device.properties import DeviceProperties
from treadle.runner.fused.packed_gemm import PackedGemm
from treadle.runner.fused.quantization import AFFINE, Quantization

WAYS = [
    (Quantization(2, 64), mx.bfloat16),
    (Quantization(3, 32), mx.float16),
    (Quantization(4, 32), mx.bfloat16),
    (Quantization(4, 64), mx.float16),
    (Quantization(5, 128), mx.bfloat16),
    (Quantization(6, 64), mx.float16),
    (Quantization(8, 32), mx.bfloat16),
    (Quantization(4, 32, "mxfp4"), mx.float16),
    (Quantization(4, 32, "mxfp4"), mx.bfloat16),
    (Quantization(8, 32, "mxfp8"), mx.bfloat16),
    (Quantization(4, 16, "nvfp4"), mx.float16),
]
SHAPES = [(140, 128, 1), (16, 640, 4), (123, 384, 4)]
"""Rows and columns of weights, and the device's multiprocessors."""
TOLERANCE = {mx.bfloat16: 0.008, mx.float16: 0.001}
"""Of the largest result: weights are rounded to the type of x."""
KERNELS = [shuffled(EmulatedKernel, seed) for seed in range(2)]


@pytest.mark.parametrize(("way", "dtype"), WAYS, ids=str)
def test_products_are_those_with_the_weights_made_plain(way: Quantization, dtype: Any) -> None:
    """Of any number of rows, with one tile of weights or several for a block, and with columns that fill no stage."""
    dice = random.Random(way.bits * way.group)
    tiles = set()
    for turn, (outputs, columns, processors) in enumerate(SHAPES):
        weight = mx.array(np.random.default_rng(turn).normal(0, 1, (outputs, columns)).astype(np.float32))
        parts = way.quantize(weight.astype(dtype))
        chip = DeviceProperties(processors=processors)
        product = PackedGemm(*parts, way, dtype, KERNELS[turn % len(KERNELS)], chip)
        tiles.add(product._tiles)
        for rows in (dice.randint(1, 16), dice.randint(17, 64)):
            check(product, parts, way, dtype, rows)
    assert tiles == {1, 2, 4}


def check(product: PackedGemm, parts: Any, way: Quantization, dtype: Any, rows: int) -> None:
    codes, scales, biases = parts
    if way.mode == AFFINE:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = np.array(way.dequantize(codes, scales, biases, mx.float32), np.float64)
    x = mx.array(np.random.default_rng(rows).normal(0, 1, (rows, weight.shape[1])).astype(np.float32)).astype(dtype)
    wanted = np.array(x.astype(mx.float32), np.float64) @ weight.T
    bias: Any = mx.array(np.random.default_rng(1).normal(0, 1, len(weight)).astype(np.float32)).astype(x.dtype)
    bias = bias if rows % 2 else None
    wanted += 0 if bias is None else np.array(bias.astype(mx.float32))
    found = np.array(product(x, bias).astype(mx.float32))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


def test_the_ring_is_shorter_where_there_is_less_shared_memory() -> None:
    """On a consumer's device, and with the largest widths and batches."""
    way = Quantization(8, 64)
    parts = way.quantize(mx.random.normal((128, 512)).astype(mx.float16))
    chip = DeviceProperties(processors=2, shared=99 * 1024)
    product = PackedGemm(*parts, way, mx.float16, EmulatedKernel, chip)
    assert product.most_rows == 64
    assert [product._memory(rows)[0] for rows in (8, 16, 32, 64)] == [4, 3, 2, 2]
    assert all(product._memory(rows)[1] <= chip.shared for rows in (8, 16, 32, 64))
    check(product, parts, way, mx.float16, 30)


@pytest.mark.parametrize(
    ("way", "columns", "dtype"),
    [
        (Quantization(4, 32), 96, mx.float16),
        (Quantization(3, 64), 64, mx.float16),
        (Quantization(4, 64), 128, mx.float32),
    ],
)
def test_what_it_does_not_support_is_refused(way: Quantization, columns: int, dtype: Any) -> None:
    parts = way.quantize(mx.zeros((32, columns)))
    with pytest.raises(NotImplementedError, match=f"{columns} columns"):
        PackedGemm(*parts, way, dtype, EmulatedKernel)
