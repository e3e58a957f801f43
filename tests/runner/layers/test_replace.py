"""Layers that are replaced by faster ones, tested first, and their own methods when they are wanted."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from treadle.runner.layers.replace import Faster, Makers, ReplacedLayers
from treadle.runner.mlxlm.random_rounding import random_rounding

LINEAR, EMBEDDING = "mlx.nn.layers.linear.Linear", "mlx.nn.layers.embedding.Embedding"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.inner = [nn.Linear(8, 8, bias=False), nn.Linear(8, 8)]
        self.again = self.inner[0]
        self.out = nn.Linear(8, 4, bias=False)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.inner:
            x = layer(x)
        return self.embed.as_linear(x), self.out(x)


class Counted:
    """Makers of methods that count their calls, and add `error` to what the layer's own return."""

    def __init__(self, error: float = 0.0, label: str = "linear layers") -> None:
        self.calls = 0
        self.error = error
        self.label = label

    def makers(self, name: str = "__call__", kind: str = LINEAR) -> Makers:
        return {kind: lambda layer: self.faster(layer, name)}

    def faster(self, layer: Any, name: str) -> Faster | None:
        if "bias" in layer:
            return None
        own = getattr(type(layer), name)

        def method(x: Any) -> Any:
            self.calls += 1
            return own(layer, x) + self.error

        return Faster({name: method}, (name, layer.weight.shape), self.label, lambda: [(mx.ones((3, 8)),)])


def outputs(model: Model) -> list[Any]:
    made = model(mx.array([[1, 2]]))
    mx.eval(made)
    return list(made)


def test_layers_compute_by_their_faster_methods_until_they_are_removed() -> None:
    model, counted = Model(), Counted()
    layers = ReplacedLayers(model, counted.makers())
    expected = outputs(model)
    layers.install()
    assert (len(layers), layers.labels) == (2, {"linear layers": 2})
    assert counted.calls == 2, "one of each shape is tested"
    found = outputs(model)
    assert counted.calls == 4
    assert all(mx.array_equal(a, b).item() for a, b in zip(expected, found, strict=True))
    layers.remove()
    outputs(model)
    assert counted.calls == 4
    assert type(model.out) is nn.Linear
    assert "faster_call" not in vars(model.out)


def test_a_replaced_layer_is_still_of_its_class_with_its_weights() -> None:
    model = Model()
    names = set(model.out.parameters())
    layers = ReplacedLayers(model, Counted().makers())
    layers.install()
    assert isinstance(model.out, nn.Linear)
    assert (type(model.out).__name__, type(model.out).__module__) == ("Linear", nn.Linear.__module__)
    assert set(model.out.parameters()) == names
    assert model.inner[0] is model.again


def test_another_method_than_the_call_is_replaced() -> None:
    model, counted = Model(), Counted()
    layers = ReplacedLayers(model, counted.makers("as_linear", EMBEDDING))
    layers.install()
    outputs(model)
    assert counted.calls == 2
    with layers.originals():
        outputs(model)
    assert counted.calls == 2
    outputs(model)
    assert counted.calls == 3


def test_the_own_methods_are_used_inside_the_block_alone_also_with_random_rounding() -> None:
    model, counted = Model(), Counted()
    layers = ReplacedLayers(model, counted.makers())
    layers.install()
    before = counted.calls
    with layers.originals(), random_rounding(model):
        outputs(model)
    assert counted.calls == before
    outputs(model)
    assert counted.calls == before + 2


def test_originals_before_the_first_install_make_nothing() -> None:
    counted = Counted()
    layers = ReplacedLayers(Model(), counted.makers())
    with layers.originals():
        pass
    assert (counted.calls, len(layers), layers.installed) == (0, 0, False)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_wrong_results_leave_the_layer_as_it_is(error: float, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    layers = ReplacedLayers(model, Counted(error).makers())
    layers.install()
    assert len(layers) == 0
    assert "of the largest one off" in layers.rejected["linear layers"]
    assert all("linear layers failed their self-test" in record.message for record in caplog.records)
    assert type(model.out) is nn.Linear


def test_another_type_is_a_wrong_result() -> None:
    def faster(layer: Any) -> Faster | None:
        return None if "bias" in layer else Faster({"__call__": half}, 0, "some", lambda: [(mx.ones((3, 8)),)])

    def half(x: Any) -> Any:
        return x.astype(mx.float16)

    layers = ReplacedLayers(Model(), {LINEAR: faster})
    layers.install()
    assert "float16" in layers.rejected["some"]


def test_a_method_that_raises_is_left_out() -> None:
    def raising(x: Any) -> Any:
        raise RuntimeError("nvrtc: no such kernel")

    layers = ReplacedLayers(
        Model(), {LINEAR: lambda layer: Faster({"__call__": raising}, 0, "some", lambda: [(mx.ones((3, 8)),)])}
    )
    layers.install()
    assert "nvrtc: no such kernel" in layers.rejected["some"]


def test_rejected_layers_do_not_come_back(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    layers = ReplacedLayers(model, Counted().makers())
    layers.install()
    with caplog.at_level(logging.WARNING):
        layers.reject("its logits are not the model's own")
    assert type(model.out) is nn.Linear
    layers.install()
    assert type(model.out) is nn.Linear
    assert layers.rejected == {"faster layers together": "its logits are not the model's own"}
    assert "its logits are not the model's own" in caplog.text
