"""Root-mean-square norms on the CPU in compiled functions: what mlx-lm's layers compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma, gemma3_text

from tests.runner.layers.models import installed_on_cpu

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
