"""Blocks of experts: each known class gives what its own code gives, with the kernels around its experts."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.support.architectures import config_of, new_module
from tests.support.cuda import ReferenceKernel, failing
from treadle.runner.fused.mixture_kernels import Choice, Score
from treadle.runner.layers import mixtures
from treadle.runner.layers.choose import FasterLayers
from treadle.runner.layers.mixtures import FACTS
from treadle.runner.layers.replace import full_name

CHANGED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "bailing_moe": {"num_experts": 8, "n_group": 2, "topk_group": 1, "score_function": "sigmoid"},
    "kimi_linear": {"num_experts": 8, "num_expert_group": 2, "topk_group": 1},
    "nemotron_h": {"hybrid_override_pattern": list("ME*E"), "n_routed_experts": 4, "num_experts_per_tok": 2},
    "lfm2_moe": {"use_expert_bias": True},
}
"""Fields in which a tiny model has more of what the kernel can do."""
_NEMOTRON: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}


def made(name: str, **changed: Any) -> tuple[Any, Any]:
    """A random model in float16 with quantized experts, which MLX has for CPUs, and its first block of that class."""
    architecture = name.split(".")[2]
    some = _NEMOTRON if architecture == "nemotron_h" else {}
    module = new_module(config_of(architecture, **{**some, **CHANGED.get(architecture, {}), **changed}))
    module.set_dtype(mx.float16)
    block = next(one for one in module.modules() if full_name(type(one)) == name)
    for one in block.modules():
        for part in ("bias", "expert_bias", "e_score_correction_bias"):
            if one.get(part) is not None:
                one[part] = (mx.random.normal(one[part].shape, key=mx.random.key(1)) / 2).astype(mx.float16)
        if "weight" in one and not mx.any(one.weight).item():  # a router's own
            one.weight = (mx.random.normal(one.weight.shape, key=mx.random.key(3)) / 8).astype(mx.float16)
        if type(one).__name__ == "SwitchLinear":  # as loud as shared experts
            one.weight = one.weight * 6
    experts = next(one for one in block.modules() if type(one).__name__ in ("SwitchGLU", "SwitchMLP"))
    nn.quantize(experts, group_size=32, bits=8)
    mx.eval(module.parameters())
    return module, block


def faster(module: Any) -> FasterLayers:
    layers = FasterLayers(module, "cuda", kernel=ReferenceKernel)
    layers.install()
    return layers


def labels(layers: FasterLayers) -> list[str]:
    return [label for label in (*layers.labels, *layers.rejected) if label.startswith("mixtures")]


@pytest.mark.parametrize("name", FACTS)
def test_each_block_gives_what_its_own_code_gives(name: str) -> None:
    module, block = made(name)
    layers = faster(module)
    assert len(labels(layers)) == 1
    assert not [label for label in labels(layers) if label in layers.rejected], layers.rejected
    x = mx.random.normal((2, 3, 256), key=mx.random.key(2)).astype(mx.float16)
    found = block(x)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    wide = mx.random.normal((1, 1, 256)).astype(mx.float32)
    with layers.originals():
        own = block(x), block(wide)
    close: Any = mx.abs(found.astype(mx.float32) - own[0].astype(mx.float32)) <= 0.02 * mx.abs(own[0]).max()
    assert close.all(axis=-1).sum().item() >= 5  # where experts are nearly equal, others may be chosen
    assert (block(wide) == own[1]).all().item()  # of another type


JOINED = {
    "mlx_lm.models.deepseek_v3.DeepseekV3MoE": {"moe_intermediate_size": 64, "n_shared_experts": 1},
    "mlx_lm.models.glm4_moe.MoE": {"moe_intermediate_size": 64, "n_shared_experts": 1},
    "mlx_lm.models.kimi_linear.KimiSparseMoE": {"moe_intermediate_size": 64},
    "mlx_lm.models.qwen3_next.Qwen3NextSparseMoeBlock": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
"""Blocks whose shared expert is as large as the others."""


def joined(name: str) -> tuple[Any, Any]:
    """A model whose shared experts are quantized as the others are."""
    module, block = made(name, **JOINED[name])
    for one in (getattr(block, "shared_experts", None), getattr(block, "shared_expert", None)):
        if one is not None:
            nn.quantize(one, group_size=32, bits=8)
    mx.eval(module.parameters())
    return module, block


def memory() -> int:
    """Bytes that MLX holds."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("name", JOINED)
def test_a_shared_expert_is_one_more_of_the_others(name: str) -> None:
    """Its weights are held once, and a block's own code computes as before."""
    module, block = joined(name)
    parts: Any = [block.switch_mlp.up_proj, (block.get("shared_experts") or block.get("shared_expert")).up_proj]
    before = [mx.array(one[array]) for one in parts for array in ("weight", "scales", "biases")]
    x = mx.random.normal((4, 1, 256), key=mx.random.key(2)).astype(mx.float16)
    own = block(x)
    mx.eval(before, own)
    held = memory()
    layers = FasterLayers(module, "cuda", kernel=ReferenceKernel)
    layers.restrict([block])  # others have experts that MLX does not compute on a CPU
    layers.install()
    assert not layers.rejected
    found = block(x)
    mx.eval(found)
    assert memory() < held + block.switch_mlp.up_proj.weight.nbytes, "some weights are held twice"
    call: Any = block.faster_call
    assert call.choice.shared
    assert call.choice.gated == ("shared_expert_gate" in block)
    assert call.shared is None
    close: Any = mx.abs(found.astype(mx.float32) - own.astype(mx.float32)) <= 0.02 * mx.abs(own).max()
    assert close.all(axis=-1).sum().item() >= 3
    after = [one[array] for one in parts for array in ("weight", "scales", "biases")]
    assert all(mx.array_equal(*pair).item() for pair in zip(before, after, strict=True))
    with layers.originals():
        assert mx.array_equal(block(x), own).item()
        assert memoryview(block.switch_mlp.up_proj.scales).c_contiguous


def test_shared_experts_of_another_kind_stay_apart() -> None:
    name = "mlx_lm.models.glm4_moe.MoE"
    module, block = made(name, **JOINED[name])  # its shared expert is not quantized
    assert not faster(module).rejected
    assert block.faster_call.shared is block.shared_experts


def test_experts_have_faster_methods_of_their_own_where_those_of_their_block_fail() -> None:
    module, block = joined("mlx_lm.models.glm4_moe.MoE")
    layers = FasterLayers(module, "cuda", kernel=failing("combine_experts").kernel)
    layers.install()
    assert [label for label in layers.rejected if label.startswith("mixtures")] == labels(layers)
    assert [label for label in layers.labels if label.startswith("experts")]
    assert "faster_call" in vars(block.switch_mlp)


@pytest.mark.parametrize(
    "change",
    [
        {"normalized": False},
        {"factor": 1.0},
        {"score": Score.SOFTMAX},
        {"bias": None},
        {"top": 1},
    ],
    ids=str,
)
def test_a_block_whose_facts_are_wrong_keeps_its_own_code(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mlx_lm.models.deepseek_v3.DeepseekV3MoE"
    facts = FACTS[name]

    def choice(layer: Any) -> Choice:
        right = facts.choice(layer)
        assert right is not None
        return replace(right, **change)

    monkeypatch.setitem(mixtures.FACTS, name, replace(facts, choice=choice))
    module, _ = made(name)
    layers = faster(module)
    assert labels(layers)[0] in layers.rejected


@pytest.mark.parametrize(
    "choice", [Choice(33, Score.SIGMOID), Choice(2, Score.SIGMOID, groups=3), Choice(5, Score.SIGMOID)]
)
def test_choices_that_a_warp_can_not_make_are_left_to_the_model(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mlx_lm.models.mixtral.MixtralSparseMoeBlock"
    monkeypatch.setitem(mixtures.FACTS, name, replace(FACTS[name], choice=lambda layer: choice))
    assert not labels(faster(made(name)[0]))
    assert not choice.takes(4)


def test_latent_experts_and_sharded_ones_are_left_to_the_model() -> None:
    name = "mlx_lm.models.nemotron_h.NemotronHMoE"
    assert not labels(faster(made(name, moe_latent_size=64)[0]))


def test_margins_are_those_of_the_choice() -> None:
    logits = mx.array([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 5.5, 1.0]])
    assert Choice(2, Score.CHOSEN_SOFTMAX).margins(logits).tolist() == [1.0, 4.0]
    assert Choice(4, Score.CHOSEN_SOFTMAX).margins(logits).tolist() == [np.inf, np.inf]
    grouped = Choice(1, Score.CHOSEN_SOFTMAX, groups=2, kept=1)
    assert grouped.margins(logits).tolist() == [2.0, 1.5]  # sums of groups 4 and 2; 5 and 6.5
    assert grouped.kept_keys(logits).tolist() == [[3.0, 1.0, 0.0, 0.0], [0.0, 0.0, 5.5, 1.0]]
