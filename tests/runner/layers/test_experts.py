"""Mixtures of experts on CUDA: the layers that go to the kernels, and what they give there."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from tests.support.cuda import ReferenceKernel, failing
from treadle.core.compute_path import KernelPolicy, KernelState, KernelStatus
from treadle.runner.layers.choose import FasterLayers
from treadle.runner.layers.experts import reason_against

FOUR = {"group_size": 64, "bits": 4}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")


class Model(nn.Module):
    """One layer with experts, quantized as `how` says."""

    def __init__(
        self, how: dict[str, Any] | None = FOUR, kind: Any = SwitchGLU, dtype: Any = mx.float16, **options: Any
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(128)
        self.norm.set_dtype(dtype)
        self.experts = kind(128, 64, 4, **options)
        for name in PROJECTIONS:
            if (one := getattr(self.experts, name, None)) is not None:
                if "bias" in one:
                    one.bias = mx.random.normal(one.bias.shape, key=mx.random.key(3))
                one.set_dtype(dtype)
                if how is not None:
                    setattr(self.experts, name, one.to_quantized(**how))
        mx.eval(self.parameters())


def faster(model: Model, kernel: Any = ReferenceKernel, policy: KernelPolicy = KernelPolicy.AUTO) -> FasterLayers:
    layers = FasterLayers(model, "cuda", policy, kernel)
    layers.install()
    return layers


def status(layers: FasterLayers) -> KernelStatus:
    return next(one for one in layers.statuses if one.name == "experts")


def inputs(tokens: int, dtype: Any = mx.float16) -> tuple[Any, Any]:
    """Return x (T, 1, K), and two experts of each token (T, 1, 2)."""
    x = mx.random.normal((tokens, 1, 128), key=mx.random.key(tokens)).astype(dtype)
    order = mx.argsort(mx.random.uniform(shape=(tokens, 1, 4), key=mx.random.key(1)), axis=-1)
    return x, order[..., :2]


def check(model: Model, *, tokens: int = 9, tolerance: float = 0.01) -> None:
    """Compare the faster layer with mlx-lm's in float32."""
    x, chosen = inputs(tokens)
    found = model.experts(x, chosen)
    assert found.dtype == mx.float16
    assert found.shape == (tokens, 1, 2, 128)
    layers = model.experts
    for name in PROJECTIONS:
        if (one := getattr(layers, name, None)) is not None and "scales" not in one:
            one.set_dtype(mx.float32)
    own = next(kind for kind in type(layers).__mro__ if "faster_call" not in kind.__call__.__code__.co_names)
    wanted = own.__call__(layers, x.astype(mx.float32), chosen)
    error = mx.abs(found.astype(mx.float32) - wanted).max() - tolerance * mx.abs(wanted).max()
    assert (error < 0).item()


@pytest.mark.parametrize("how", [FOUR, MXFP4, {"group_size": 32, "bits": 8}])
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_quantized_experts_give_what_mlx_lm_s_give(how: dict[str, Any], tokens: int) -> None:
    model = Model(how)
    layers = faster(model)
    assert not layers.rejected
    assert status(layers).state is KernelState.ACTIVE
    check(model, tokens=tokens)


def test_layers_without_a_gate_go_to_the_kernels_too() -> None:
    model = Model(kind=SwitchMLP, activation=nn.ReLU2())
    assert status(faster(model)).state is KernelState.ACTIVE
    check(model)


def test_biases_are_added() -> None:
    model = Model(bias=True)
    assert not faster(model).rejected
    check(model)


@pytest.mark.parametrize("activation", [nn.Tanh(), lambda x, gate: mx.tanh(gate) + x])
def test_an_activation_that_the_kernels_do_not_have_is_the_layer_s_own(activation: Any) -> None:
    model = Model(kind=SwitchMLP if isinstance(activation, nn.Module) else SwitchGLU, activation=activation)
    assert not faster(model).rejected
    check(model)


def test_gate_and_linear_part_may_be_quantized_differently() -> None:
    model = Model()
    gate = SwitchGLU(128, 64, 4).gate_proj
    gate.set_dtype(mx.float16)
    model.experts.gate_proj = gate.to_quantized(group_size=64, bits=8)
    assert not faster(model).rejected
    check(model)


def test_numbers_of_another_type_go_to_mlx_lm() -> None:
    model = Model()
    faster(model)
    x, chosen = inputs(3, mx.float32)
    assert model.experts(x, chosen).dtype == mx.float32


def test_scales_are_held_once_in_the_kernels_order() -> None:
    """The layer's own are views: the reference logits come from them."""
    model = Model()
    before = [mx.array(model.experts.up_proj.scales), mx.array(model.experts.up_proj.biases)]
    mx.eval(before)
    held = mx.get_active_memory()
    faster(model)
    mx.synchronize()  # or what was computed last may still be held by MLX's thread
    mx.clear_cache()
    assert mx.get_active_memory() <= held + 4096
    after = [model.experts.up_proj.scales, model.experts.up_proj.biases]
    assert all(mx.array_equal(one, other).item() for one, other in zip(before, after, strict=True))


def test_a_kernel_that_is_refused_leaves_the_layer_as_it_was() -> None:
    model = Model()
    layers = faster(model, failing("few_rows").kernel)
    assert type(model.experts) is SwitchGLU
    assert status(layers).state is KernelState.FAILED
    assert "no kernel few_rows today" in status(layers).reason
    assert memoryview(model.experts.up_proj.scales).c_contiguous


def test_without_kernels_nothing_changes() -> None:
    model = Model()
    layers = faster(model, policy=KernelPolicy.OFF)
    assert type(model.experts) is SwitchGLU
    assert "experts" not in [one.name for one in layers.statuses]


def test_a_model_without_experts_needs_no_kernels() -> None:
    assert status(faster(nn.Linear(8, 8))).reason == "the model has no experts"


@pytest.mark.parametrize(
    ("how", "dtype", "why"),
    [
        (None, mx.float32, "weights in mlx.core.float32"),
        (
            {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True},
            mx.float16,
            "weights with a scale of each expert",
        ),
        (FOUR, mx.float32, "weights in mlx.core.float32"),
    ],
)
def test_weights_that_the_kernels_do_not_take_are_told(how: Any, dtype: Any, why: str) -> None:
    layers = faster(Model(how, dtype=dtype))
    assert status(layers).state is KernelState.NOT_APPLICABLE
    assert status(layers).reason == why


def test_shapes_that_the_kernels_do_not_take_are_told() -> None:
    narrow = SwitchGLU(32, 24, 4)
    narrow.set_dtype(mx.float16)
    assert reason_against(narrow.gate_proj, mx.float16) == "4 experts of 32 columns and 24 rows"
    assert reason_against(nn.Linear(8, 8), mx.float16) == "experts of class mlx.nn.layers.linear.Linear"


def test_scales_beyond_the_type_s_exponents_are_told() -> None:
    layer = Model(MXFP4).experts.gate_proj
    layer.scales = mx.full(layer.scales.shape, 200, mx.uint8)
    assert reason_against(layer, mx.float16) == "scales that are too large"


def test_gelu_is_computed_between_the_products() -> None:
    model = Model(activation=GeGLU())
    assert not faster(model).rejected
    check(model)


def test_other_activations_of_mlx_lm_are_fused() -> None:
    """The stand-in knows no other than SwiGLU and GeGLU: it says so where it meets one."""
    layers = faster(Model(activation=SwigluOAI(limit=2.0)))
    assert "the emulator computes the others" in status(layers).reason
