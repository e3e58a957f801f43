"""The choice of a KV backend with faster layers: only what gives the model's own logits is used."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.runner.paged.models import UNFUSED, make
from tests.support.cuda import ReferenceKernels
from treadle.core.compute_path import KernelName, KernelPolicy, KernelState
from treadle.runner.kv.cost import KvCost
from treadle.runner.layers import choose as faster_layers
from treadle.runner.layers.replace import Faster, Makers
from treadle.runner.loading.backend_choice import BackendChoice, BackendRequest
from treadle.runner.loading.choose_backend import choose
from treadle.runner.loading.compute_report import compute_path
from treadle.runner.loading.probe import Probe
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect

LINEAR = "mlx.nn.layers.linear.Linear"


def makers(wrong: bool) -> Makers:
    """Makers of methods that are right in their tests, with three rows, and wrong in the model if asked."""

    def faster(layer: Any) -> Faster:
        own = type(layer).__call__

        def method(x: Any) -> Any:
            y = own(layer, x)
            return y * 1.5 if wrong and x.shape[0] != 3 else y

        columns = layer.weight.shape[1]
        return Faster({"__call__": method}, layer.weight.shape, "layers", lambda: [(mx.ones((3, columns)),)])

    return {LINEAR: faster}


def chosen(monkeypatch: pytest.MonkeyPatch, device: str, *, wrong: bool, padded: bool) -> tuple[BackendChoice, Any]:
    monkeypatch.setattr(faster_layers.FasterLayers, "_makers_for", lambda self, device: makers(wrong))
    reference = Reference(connect(), make("qwen3_moe"), 2048)
    request = BackendRequest(device, 1 << 20, 4, True, padded=padded)
    choice = choose(Probe(261, mx.float32, KvCost(1, 2), reference), request, ReferenceKernels)
    return choice, reference


@pytest.mark.parametrize(("device", "padded"), [("cuda", False), ("cpu", False), ("cpu", True)])
def test_faster_layers_serve_on_every_backend(monkeypatch: pytest.MonkeyPatch, device: str, padded: bool) -> None:
    choice, reference = chosen(monkeypatch, device, wrong=False, padded=padded)
    assert choice.config.name == ("padded" if padded else "paged" if device == "cuda" else "contiguous")
    assert reference.layers.installed
    path = compute_path(choice, device, KernelPolicy.AUTO, [], reference)
    (status,) = (kernel for kernel in path.kernels if kernel.name is KernelName.REPLACED_LAYERS)
    assert status.state is KernelState.ACTIVE
    assert " layers" in status.reason


@pytest.mark.parametrize(("device", "padded"), [("cuda", False), ("cpu", False), ("cpu", True)])
def test_faster_layers_that_are_wrong_in_the_model_leave_the_backend(
    monkeypatch: pytest.MonkeyPatch, device: str, padded: bool
) -> None:
    choice, reference = chosen(monkeypatch, device, wrong=True, padded=padded)
    assert choice.config.name == ("padded" if padded else "paged" if device == "cuda" else "contiguous")
    assert len(reference.layers) == 0
    path = compute_path(choice, device, KernelPolicy.AUTO, [], reference)
    (status,) = (kernel for kernel in path.kernels if kernel.name is KernelName.REPLACED_LAYERS)
    assert status.state is KernelState.FAILED
    assert "its logits are not the model's own" in status.reason
    assert any(line.startswith("replaced layers: faster layers together") for line in path.shortfalls())


def test_a_backend_that_fails_either_way_does_not_cost_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster_layers.FasterLayers, "_makers_for", lambda self, device: makers(wrong=False))
    reference = Reference(connect(), make(UNFUSED), 2048)

    class Wrong(ReferenceKernels):
        def write(self, pool: Any, keys: Any, values: Any, slots: Any) -> Any:
            return super().write(pool, keys * 2, values, slots)

    request = BackendRequest("cuda", 1 << 20, 4, True)
    choice = choose(Probe(261, mx.float32, KvCost(1, 2), reference), request, Wrong)
    assert choice.config.name == "contiguous"
    assert reference.layers.installed
    assert not reference.layers.rejected
