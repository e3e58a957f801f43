"""The text of the kernel for products of few rows, launched as planned for small devices, against float64."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.emulated import EmulatedKernel, host, shuffled
from treadle.runner.device.properties import DeviceProperties
from treadle.runner.fused.skinny_gemm import SkinnyGemm

KINDS = [
    (4, 128, 8, mx.bfloat16),
    (4, 64, 16, mx.float16),
    (4, 64, 32, mx.bfloat16),
    (8, 128, 8, mx.float16),
    (8, 64, 16, mx.bfloat16),
    (8, 64, 32, mx.float16),
    (16, 32, 8, mx.bfloat16),
    (16, 32, 16, mx.float16),
]
SHAPES = [(333, 2, 1), (16, 2, 4), (40, 4, 4), (100, 3, 9), (333, 4, 4), (160, 5, 1), (100, 4, 1)]
"""Rows of weights, eights of groups in each, and the device's multiprocessors."""
TOLERANCE = {mx.bfloat16: 0.006, mx.float16: 0.001}
"""Of the largest result."""
KERNELS = [shuffled(EmulatedKernel, seed) for seed in range(3)]


class Seen(SkinnyGemm):
    """Tells how it is launched."""

    ways: set[tuple[bool, bool, bool]]

    def __call__(self, x: Any, bias: Any | None = None) -> Any:
        way = self._launch(x.shape[0])
        assert way is not None
        self.ways.add((way.parts > 1, way.splits > 1, self._weights.tiles > way.across * way.warps // way.parts))
        made = super().__call__(x, bias)
        assert not any(host(counters).any() for counters in self._counters.values())
        return made


@pytest.mark.parametrize(("bits", "group", "size", "dtype"), KINDS)
def test_products_are_those_with_the_weights_made_plain(bits: int, group: int, size: int, dtype: Any) -> None:
    """Of up to `size` rows: in parts and in splits, with several tiles for a warp, the last of which may reach back."""
    dice = random.Random(bits * size)
    ways: set[tuple[bool, bool, bool]] = set()
    for turn, (outputs, eights, processors) in enumerate(SHAPES):
        columns = eights * 8 * (2 * group if bits == 16 else group)
        weight = mx.array(np.random.default_rng(turn).normal(0, 1, (outputs, columns)).astype(np.float32))
        plain = weight.astype(dtype)
        parts: tuple[Any, Any, Any] = (
            (plain, None, None) if bits == 16 else mx.quantize(plain, group_size=group, bits=bits)
        )
        product = Seen(*parts, bits, group, KERNELS[turn % len(KERNELS)], DeviceProperties(processors=processors))
        product.ways = ways
        for rows in (dice.randint(1 if size == 8 else size // 2 + 1, size), size):
            check(product, parts, bits, group, rows)
    assert {(False, True), (True, False), (False, False)} <= {(parts, splits) for parts, splits, _ in ways}
    assert bits == 16 or (size < 32, False, True) in ways


def check(product: SkinnyGemm, parts: Any, bits: int, group: int, rows: int) -> None:
    if bits == 16:
        weight = np.array(parts[0].astype(mx.float32), np.float64)
    else:
        codes, scales, biases = (part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in parts)
        weight = np.array(mx.dequantize(codes, scales, biases, group_size=group, bits=bits), np.float64)
    x = mx.array(np.random.default_rng(rows).normal(0, 1, (rows, weight.shape[1])).astype(np.float32))
    x = x.astype(parts[0].dtype if bits == 16 else parts[1].dtype)
    wanted = np.array(x.astype(mx.float32), np.float64) @ weight.T
    bias: Any = mx.array(np.random.default_rng(1).normal(0, 1, len(weight)).astype(np.float32)).astype(x.dtype)
    bias = bias if rows % 2 else None
    wanted += 0 if bias is None else np.array(bias.astype(mx.float32))
    found = np.array(product(x, bias).astype(mx.float32))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[x.dtype] * np.abs(wanted).max())
