"""Quantized linear layers on a CPU, which dequantize their weights where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from treadle.core.compute_path import KernelState
from treadle.runner.layers.choose import FasterLayers
from treadle.runner.layers.linear_cpu import CpuLinearMakers
from treadle.runner.layers.replace import ReplacedLayers


class Model(nn.Module):
    def __init__(self, bias: bool = False, mode: str = "affine", **how: Any) -> None:
        super().__init__()
        mx.random.seed(0)
        self.up = nn.Linear(128, 96, bias=bias).to_quantized(mode=mode, **how)
        self.plain = nn.Linear(128, 96)


def clock_of(*seconds: float) -> Callable[[], float]:
    """Return a clock by which products take so many seconds, which is long enough to measure each once."""
    return iter([tick for one in seconds for tick in (0.0, one)]).__next__


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts = [0]
    own = mx.dequantize

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        return own(*args, **kwargs)

    monkeypatch.setattr(mx, "dequantize", counting)
    return counts


@pytest.mark.parametrize(("how", "bias"), [({"bits": 4}, True), ({"bits": 3}, False), ({"mode": "mxfp4"}, True)])
def test_results_are_the_layers_own_for_any_number_of_rows(
    how: dict[str, Any], bias: bool, dequantized: list[int]
) -> None:
    """Four rows take 4 seconds, and one or 32 dequantized ones 3: from three rows on that is faster."""
    model = Model(bias, **how)
    given = [mx.random.normal(shape) for shape in ((2, 1, 128), (3, 1, 128), (1, 40, 128))]
    expected = [model.up(x) for x in given]
    layers = ReplacedLayers(model, CpuLinearMakers(clock_of(4, 3, 3)).makers)
    layers.install()
    assert not layers.rejected
    assert len(layers) == 1
    assert "for 3 rows and more" in next(iter(layers.labels))
    found = []
    for x, count in zip(given, (0, 1, 1), strict=True):
        dequantized[0] = 0
        found.append(model.up(x))
        assert dequantized[0] == count
    assert all(mx.allclose(a, b, rtol=1e-4, atol=1e-4).item() for a, b in zip(expected, found, strict=True))


def test_layers_stay_where_dequantized_weights_take_as_long_a_row() -> None:
    """As by MLX's own reference BLAS."""
    layers = ReplacedLayers(Model(), CpuLinearMakers(clock_of(4, 3, 34)).makers)
    layers.install()
    assert len(layers) == 0


def test_short_products_are_timed_several_times() -> None:
    ticks = iter([0.0, 0.08, 0.0, 0.04, 0.0, 0.03, 0.0, 0.05, 0.0, 0.03, 0.0, 0.1])
    model = Model()
    makers = CpuLinearMakers(ticks.__next__)
    layers = ReplacedLayers(model, makers.makers)
    layers.install()
    assert "for 4 rows and more" in next(iter(layers.labels))


def test_the_device_decides_in_earnest() -> None:
    model = Model()
    layers = FasterLayers(model, "cpu")
    x = mx.random.normal((200, 128))
    expected = model.up(x), model.plain(x)
    layers.install()
    for found, wanted in zip((model.up(x), model.plain(x)), expected, strict=True):
        assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-4).item()
    (status,) = layers.statuses
    assert status.state in (KernelState.ACTIVE, KernelState.NOT_APPLICABLE)
