"""Mixtures of experts on the CPU: many tokens meet each expert together, few go to mlx-lm's layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from treadle.runner.layers.choose import FasterLayers
from treadle.runner.layers.dense_experts import LEAST_PAIRS, DenseExperts

EXPERTS, COLUMNS = 4, 48
MANY = LEAST_PAIRS * EXPERTS // 2


class Model(nn.Module):
    def __init__(self, kind: Any = SwitchGLU, **options: Any) -> None:
        super().__init__()
        self.experts = kind(COLUMNS, 24, EXPERTS, **options)
        for one in self.experts.children().values():
            if "bias" in one:
                one.bias = mx.random.normal(one.bias.shape, key=mx.random.key(2))


def inputs(tokens: int, dtype: Any = mx.float32) -> tuple[Any, Any]:
    """Return x (T, 1, K), and two experts of each token, never the last one."""
    x = mx.random.normal((tokens, 1, COLUMNS), key=mx.random.key(tokens)).astype(dtype)
    order = mx.argsort(mx.random.uniform(shape=(tokens, 1, EXPERTS - 1), key=mx.random.key(1)), axis=-1)
    return x, order[..., :2]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Experts that were computed together, and their tokens."""
    seen: list[tuple[int, int]] = []
    own = DenseExperts._expert

    def expert(self: DenseExperts, x: Any, number: int) -> Any:
        seen.append((number, x.shape[0]))
        return own(self, x, number)

    monkeypatch.setattr(DenseExperts, "_expert", expert)
    return seen


@pytest.mark.parametrize(
    ("kind", "options"), [(SwitchGLU, {}), (SwitchGLU, {"bias": True}), (SwitchMLP, {"activation": nn.ReLU2()})]
)
def test_many_tokens_meet_each_expert_together(kind: Any, options: Any, computed: list[tuple[int, int]]) -> None:
    model = Model(kind, **options)
    x, chosen = inputs(MANY)
    wanted = model.experts(x, chosen)
    layers = FasterLayers(model, "cpu")
    layers.install()
    assert not layers.rejected
    computed.clear()
    found = model.experts(x, chosen)
    assert found.shape == (MANY, 1, 2, COLUMNS)
    assert mx.allclose(found, wanted, atol=1e-5).item()
    assert [expert for expert, _ in computed] == [0, 1, 2]
    assert sum(count for _, count in computed) == 2 * MANY


def test_few_tokens_go_to_mlx_lm_s_layer(computed: list[tuple[int, int]]) -> None:
    model = Model()
    FasterLayers(model, "cpu").install()
    computed.clear()
    mx.eval(model.experts(*inputs(MANY - 1)))
    assert not computed


def test_other_weights_stay_with_mlx_lm() -> None:
    quantized = Model()
    for name in ("gate_proj", "up_proj"):
        setattr(quantized.experts, name, getattr(quantized.experts, name).to_quantized(16, 4, mode="nvfp4"))
    half = Model()
    half.set_dtype(mx.float16)
    for model in (quantized, half):
        layers = FasterLayers(model, "cpu")
        layers.install()
        assert not len(layers)
