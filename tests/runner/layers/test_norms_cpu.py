"""Root-mean-square norms on the CPU in compiled functions: what mlx-lm's layers compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma, gemma3_text, qwen3_next

from tests.runner.layers.models import installed_on_cpu
from treadle.runner.device.norm_cpu import normed

COLUMNS = 96
KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: nn.RMSNorm(COLUMNS, eps=1e-3),
    "gemma": lambda: gemma.RMSNorm(COLUMNS),
    "gemma3": lambda: gemma3_text.RMSNorm(COLUMNS, 1e-6),
}


def random_norm(kind: str) -> Any:
    layer = KINDS[kind]()
    layer.weight = mx.random.normal((COLUMNS,), key=mx.random.key(0))
    return layer


@pytest.mark.parametrize("shape", [(1, 1, COLUMNS), (4, 1, COLUMNS), (2, 3, 5, COLUMNS), (1, 200, COLUMNS)])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_the_model(kind: str, shape: tuple[int, ...]) -> None:
    layer = random_norm(kind)
    x = 10 * mx.random.normal(shape, key=mx.random.key(1))
    wanted = layer(x)
    installed_on_cpu(layer)
    np.testing.assert_allclose(layer(x), wanted, rtol=1e-4, atol=1e-6)


def test_inputs_in_half_precision_stay_so() -> None:
    layer = random_norm("plain")
    layer.weight = layer.weight.astype(mx.float32)
    x = mx.random.normal((3, 1, COLUMNS), key=mx.random.key(1)).astype(mx.bfloat16)
    wanted = layer(x)
    installed_on_cpu(layer)
    assert layer(x).dtype == wanted.dtype
    np.testing.assert_array_equal(layer(x).astype(mx.float32), wanted.astype(mx.float32))


@pytest.mark.parametrize("weight", [None, mx.ones((COLUMNS,), mx.bfloat16)])
def test_norms_without_a_weight_or_in_half_precision_stay_the_models(weight: Any) -> None:
    layer = nn.RMSNorm(COLUMNS)
    if weight is None:
        del layer["weight"]
    else:
        layer.weight = weight
    assert len(installed_on_cpu(layer, count=0)) == 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("rows", [2, 100])
def test_gated_norms_are_those_of_the_model(rows: int, dtype: Any) -> None:
    layer = qwen3_next.Qwen3NextRMSNormGated(COLUMNS)
    layer.weight = mx.random.normal((COLUMNS,), key=mx.random.key(0))
    x, gate = (mx.random.normal((rows, 1, 3, COLUMNS), key=mx.random.key(i)).astype(dtype) for i in range(2))
    wanted = [layer(x, gate), layer(x)]
    installed_on_cpu(layer)
    for found, expected in zip([layer(x, gate), layer(x)], wanted, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found.astype(mx.float32), expected.astype(mx.float32), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 100])
def test_norms_without_a_weight_and_with_a_factor(rows: int) -> None:
    x = mx.random.normal((rows, 1, 2, COLUMNS), key=mx.random.key(0))
    wanted = mx.fast.rms_norm(x, None, 1e-3)
    np.testing.assert_allclose(normed(x, 1e-3), wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(normed(x, 1e-3, 0.25), wanted * 0.25, rtol=1e-4, atol=1e-6)
