"""Plain linear layers on the CPU: one product for those that read the same input, with the model's own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.runner.layers.models import installed_on_cpu
from treadle.runner.layers import plain_linear_cpu
from treadle.runner.layers.plain_linear_cpu import MOST_TOKENS

COLUMNS = 24


class Attention(nn.Module):
    def __init__(self, *, bias: bool = False, outputs: tuple[int, ...] = (32, 16, 8)) -> None:
        super().__init__()
        for name, rows in zip(("q_proj", "k_proj", "v_proj"), outputs, strict=True):
            self[name] = nn.Linear(COLUMNS, rows, bias=bias)
        self.o_proj = nn.Linear(COLUMNS, 7, bias=bias)

    def __call__(self, x: Any) -> list[Any]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(x)]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of the products that were computed."""
    columns: list[int] = []
    own: Callable[..., Any] = plain_linear_cpu._product

    def product(weight: Any, bias: Any, x: Any) -> Any:
        columns.append(weight.shape[1])
        return own(weight, bias, x)

    monkeypatch.setattr(plain_linear_cpu, "_product", product)
    return columns


def tokens(count: int, seed: int = 0) -> Any:
    return mx.random.normal((count, 1, COLUMNS), key=mx.random.key(seed))


def check(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 5, MOST_TOKENS, MOST_TOKENS + 1])
def test_layers_that_read_the_same_input_are_one_product_for_few_tokens(
    count: int, bias: bool, products: list[int]
) -> None:
    layer = Attention(bias=bias)
    wanted = layer(tokens(count))
    installed_on_cpu(layer, count=4)
    del products[:]
    check(layer(tokens(count)), wanted)
    assert products == ([56, 7] if count <= MOST_TOKENS else [32, 16, 8, 7])


def test_other_inputs_between_them_change_nothing(products: list[int]) -> None:
    layer = Attention()
    x, y = tokens(3), tokens(2, seed=1)
    wanted = [layer.q_proj(x), layer.k_proj(y), layer.v_proj(y), layer.q_proj(y), layer.q_proj(y)]
    installed_on_cpu(layer, count=4)
    check([layer.q_proj(x), layer.k_proj(y), layer.v_proj(y), layer.q_proj(y), layer.q_proj(y)], wanted)


def test_where_one_is_left_out_they_are_computed_apart_after_a_while(products: list[int]) -> None:
    layer = Attention()
    faster = installed_on_cpu(layer, count=4)
    del products[:]
    for seed in range(20):
        x = tokens(2, seed)
        check([layer.q_proj(x)], [x @ layer.q_proj.weight.T])
    assert products[0] == 56
    assert products[-1] == 32
    with faster.originals():
        pass
    del products[:]
    layer(tokens(2))
    assert products == [56, 7], "it may be another model's pass"


def test_the_weights_stay_the_models_and_are_in_memory_once() -> None:
    layer = Attention(outputs=(2000, 2000, 2000))
    wanted = [np.array(one) for _, one in sorted(layer.q_proj.items())]
    mx.eval(layer.parameters())
    before = mx.get_active_memory()
    faster = installed_on_cpu(layer, count=4)
    mx.clear_cache()
    assert mx.get_active_memory() < before + 2000 * COLUMNS * 4
    for found, expected in zip((one for _, one in sorted(layer.q_proj.items())), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
    x = tokens(2)
    with faster.originals():
        wanted = layer(x)
    check(layer(x), wanted)


def test_layers_of_other_types_or_inputs_are_left_apart(products: list[int]) -> None:
    half, other = Attention(), Attention()
    half.set_dtype(mx.bfloat16)
    other.v_proj = nn.Linear(COLUMNS, 8, bias=True)
    installed_on_cpu(half, other, count=4)
    del products[:]
    other(tokens(2))
    assert products == [32, 16, 8, 7]
