"""Random rounding: errors of the floating type's own size, in every layer, and none afterwards."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from treadle.runner.mlxlm.random_rounding import random_rounding


class Doubled(nn.Linear):
    """A layer class with a `__call__` of its own."""

    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


class Gate(nn.Module):
    """A layer that returns indices and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones((8, 8))

    def __call__(self, x: Any) -> tuple[Any, Any]:
        return mx.argmax(x, axis=-1), x @ self.weight


def some(dtype: Any, layer: Any) -> tuple[nn.Module, Any]:
    mx.random.seed(0)
    model = nn.Sequential(layer)
    model.set_dtype(dtype)
    return model, mx.random.normal((64, 8)).astype(dtype)


@pytest.mark.parametrize(("dtype", "unit"), [(mx.float32, 2**-23), (mx.float16, 2**-10), (mx.bfloat16, 2**-7)])
@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
def test_errors_are_up_to_a_unit_in_the_last_place_and_end_with_the_block(dtype: Any, unit: float, kind: Any) -> None:
    model, x = some(dtype, kind(8, 8, bias=False))
    exact = np.array(model(x).astype(mx.float32))
    call = kind.__dict__.get("__call__")
    with random_rounding(model):
        rounded = np.array(model(x).astype(mx.float32))
    error = np.abs(rounded - exact) / np.maximum(np.abs(exact), 1e-6)
    assert 0 < error.max() <= 2 * unit
    assert (error > 0).mean() > 0.1
    assert kind.__dict__.get("__call__") is call
    assert np.array_equal(np.array(model(x).astype(mx.float32)), exact)


def test_another_seed_gives_other_errors_and_the_same_seed_the_same() -> None:
    model, x = some(mx.bfloat16, nn.Linear(8, 8))
    found = []
    for seed in (1, 1, 2):
        with random_rounding(model, seed):
            found.append(np.array(model(x).astype(mx.float32)))
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_layers_without_weights_and_results_that_are_no_floats_are_left_alone() -> None:
    gate = Gate()
    x = mx.random.normal((4, 8))
    with random_rounding(nn.Sequential(gate, nn.ReLU())):
        indices, scores = gate(x)
    assert mx.array_equal(indices, mx.argmax(x, axis=-1)).item()
    assert mx.array_equal(scores, x @ gate.weight).item()


def test_what_the_model_raises_comes_through_and_its_classes_are_restored() -> None:
    model, _ = some(mx.float32, Doubled(8, 8))
    call = Doubled.__call__
    with pytest.raises(ValueError, match="must match"), random_rounding(model):
        model(mx.zeros((2, 3)))
    assert Doubled.__call__ is call
