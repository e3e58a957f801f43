"""Rotary embeddings on the CPU by tables: what mlx-lm's layers compute, with angles made once a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from tests.runner.layers.models import installed_on_cpu
from treadle.runner.layers.rotary_cpu import RotaryTables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, Callable[[], Any]] = {
    "halves": lambda: nn.RoPE(16),
    "neighbours": lambda: nn.RoPE(16, traditional=True),
    "scaled": lambda: nn.RoPE(16, base=1e6, scale=0.25),
    "llama3": lambda: Llama3RoPE(16, scaling_config=LLAMA3),
    "yarn": lambda: YarnRoPE(16, traditional=True, scaling_factor=4.0, mscale=0.7, mscale_all_dim=1.0),
    "long": lambda: SuScaledRoPE(16, long_factor=[1.0 + i for i in range(8)]),
    "proportional": lambda: ProportionalRoPE(16, 8),
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of positions for which tables were made."""
    counts: list[int] = []
    own = RotaryTables._new_factors

    def new_factors(self: RotaryTables, width: int) -> Any:
        counts.append(self._positions.shape[0])
        return own(self, width)

    monkeypatch.setattr(RotaryTables, "_new_factors", new_factors)
    return counts


@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_many_sequences_are_rotated_as_by_the_model(kind: str, width: int, made: list[int]) -> None:
    layer = KINDS[kind]()
    x = mx.random.normal((7, 3, 1, width), key=mx.random.key(0))
    positions = mx.array([0, 1, 5, 999, 31, 32, 2000], mx.int32)
    wanted = layer(x, offset=positions)
    installed_on_cpu(layer)
    del made[:]
    np.testing.assert_allclose(layer(x, offset=positions), wanted, atol=2e-6)
    assert made == [7]


def test_layers_with_the_same_parameters_make_the_angles_of_a_pass_once(made: list[int]) -> None:
    first, second, other = nn.RoPE(16), nn.RoPE(16), nn.RoPE(16, base=500.0)
    installed_on_cpu(first, second, other)
    del made[:]
    x = mx.random.normal((5, 2, 1, 16), key=mx.random.key(0))
    for positions in (mx.arange(5), mx.arange(5, 10)):
        same = [layer(x, offset=positions) for layer in (first, second, other)]
        np.testing.assert_array_equal(same[0], same[1])
        assert not np.allclose(same[0], same[2])
    assert made == [5] * 4, "for two kinds and two passes"


def test_whole_sequences_and_other_types_are_left_to_the_model(made: list[int]) -> None:
    layer = nn.RoPE(16)
    x = mx.random.normal((2, 3, 6, 16), key=mx.random.key(0))
    some = [(x, 4), (x, mx.array([1, 2])), (x[:, :, :1].astype(mx.float16), mx.array([1, 2]))]
    wanted = [layer(*one) for one in some]
    installed_on_cpu(layer)
    del made[:]
    for one, expected in zip(some, wanted, strict=True):
        np.testing.assert_array_equal(layer(*one), expected)
    assert made == []


def test_the_model_is_freed_with_its_tables() -> None:
    """Nothing has to wait for the garbage collector."""
    layer = nn.RoPE(16)
    layers = installed_on_cpu(layer)
    layer(mx.zeros((1, 1, 1, 16)), offset=mx.array([3]))
    before = mx.get_active_memory()
    del layer, layers
    assert mx.get_active_memory() < before
