"""Contradictions in a config.json, found before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.models.config_checks import faults

GROUPS = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5, and must be 1 to 4 (num_experts is 4)",
        ),
        (
            {"num_local_experts": 2, "num_experts_per_tok": 0},
            "num_experts_per_tok is 0, and must be 1 to 2 (num_local_experts is 2)",
        ),
        ({"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 7}, "moe_topk is 7, and must be 1 to 6"),
        ({"layer_types": ["conv"], "num_hidden_layers": 2}, "layer_types has 1 entries, and num_hidden_layers is 2"),
        ({"text_config": {"layer_types": [], "num_hidden_layers": 1}}, "layer_types has 0 entries"),
        ({"quantization": {**GROUPS, "bits": 7}}, "quantization: bits is 7, and MLX has 1, 2, 3, 4, 5, 6, 8 in mode"),
        ({"quantization": {**GROUPS, "bits": True}}, "quantization: bits is true"),
        ({"quantization": {**GROUPS, "group_size": 48}}, "group_size is 48, and MLX has 32, 64, 128 in mode affine"),
        ({"quantization": {**GROUPS, "mode": "foo"}}, 'mode is "foo", and MLX has affine, mxfp4, mxfp8, nvfp4'),
        ({"quantization": {**GROUPS, "mode": "nvfp4"}}, "group_size is 64, and MLX has 16 in mode nvfp4"),
        ({"quantization": {**GROUPS, "head": {"mode": "mxfp4", "bits": 8}}}, "of head: bits is 8, and MLX has 4"),
        ({"quantization": {"bits": 4}}, "quantization has no group_size"),
        ({"num_experts": 4, "num_experts_per_tok": 2.0}, "num_experts_per_tok is 2.0, and must be a whole number"),
        ({"num_experts": 4, "num_experts_per_tok": "2"}, 'num_experts_per_tok is "2", and must be a whole number'),
        ({"num_local_experts": True}, "num_local_experts is true, and must be a whole number"),
        ({"layer_types": ["conv", "sliding_atention"]}, 'layer_types[1] is "sliding_atention", which is no known type'),
        ({"layer_types": "conv"}, 'layer_types is "conv", and must be a list'),
        ({"layer_types": [["conv"], 1]}, 'layer_types[0] is ["conv"], which is no known type'),
        ({"quantization": {**GROUPS, "model.head": "8"}}, 'quantization of model.head is "8", and must be an object'),
        ({"quantization": {**GROUPS, "model.head": [8, 64]}}, "quantization of model.head is [8, 64], and must be"),
        ({"rms_norm_eps": 1e30}, "rms_norm_eps is 1e+30, and must be 0 to 1"),
        ({"text_config": {"layer_norm_epsilon": 10**400}}, "layer_norm_epsilon is 1" + "0" * 36 + "..., and must be"),
        ({"sliding_window": 8.5}, "sliding_window is 8.5, and must be a whole number"),
        ({"sliding_window": True}, "sliding_window is true, and must be a whole number"),
        ({"rms_norm_eps": True}, "rms_norm_eps is true, and must be 0 to 1"),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": 0.0},
            "attn_logit_softcapping is 0, and must be above 0",
        ),
        (
            {"text_config": {"model_type": "gemma4_text", "final_logit_softcapping": 0}},
            "final_logit_softcapping is 0, and must be above 0",
        ),
        ({"norm_eps": float("nan")}, "norm_eps is NaN, and must be 0 to 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "rope_scaling.factor is -2, and must be above 0"),
        ({"rope_parameters": {"factor": float("inf")}}, "rope_parameters.factor is Infinity, and must be above 0"),
        ({"quantization": {**GROUPS, "model.head": {"bits": "x" * 99}}}, f'of model.head: bits is "{"x" * 36}...'),
    ],
)
def test_a_contradiction_names_fields_and_values(config: dict[str, Any], fault: str) -> None:
    (found,) = faults(config)
    assert fault in found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"text_config": None, "quantization": None},
        {"num_experts": 0, "num_experts_per_tok": 0},
        {"num_experts": 1, "num_experts_per_tok": 2},  # a dense model of a family with experts
        {"num_experts": None, "num_experts_per_tok": None},
        {"num_experts": 4, "moe_topk": [2, 2]},
        {"rms_norm_eps": 1e-6, "layer_norm_eps": 0, "norm_eps": None, "layer_norm_epsilon": "x"},
        {"rope_scaling": {"factor": 8}, "rope_parameters": {"full_attention": {"factor": 4.0}}},
        {"model_type": "gear", "final_logit_softcapping": 0.0},  # none
        {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": 30},
        {"sliding_window": 4096.0, "attn_window_size": None, "use_sliding_window": True},
        {"rope_scaling": {"factor": None}, "rope_parameters": "default"},
        {"quantization": {**GROUPS, "model.head": None, "linear_class": "x"}},
        {"layer_types": ["conv", "moe", "mamba"], "num_hidden_layers": 2},  # the last one is of a layer for speculation
        {"quantization": {**GROUPS, "model.embed": False, "model.head": {"bits": 8}, "quant_method": "awq"}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4", "head": {**GROUPS, "mode": "affine"}}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4", "head": {"group_size": 64, "bits": 8}}},
    ],
)
def test_what_published_models_have_is_no_contradiction(config: dict[str, Any]) -> None:
    assert faults(config) == []
