"""Tiny configurations of the families with recurrent layers."""

from __future__ import annotations

import importlib
import math
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from tests.runner.families import COMMON
from tests.support.tiny_configs import EXPERTS, LINEAR_ATTENTION
from treadle.runner.mlxlm import connect

_FOUR = {**COMMON, "num_hidden_layers": 4}
_MAMBA_2: dict[str, Any] = {"conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True}
_MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_KIMI = {
    **COMMON,
    **_MLA,
    "num_hidden_layers": 3,
    "model_max_length": 2048,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
    },
}
_LFM = {"norm_eps": 1e-5, "conv_bias": True, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}
_BAILING = {
    **_FOUR,
    "head_dim": None,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "use_qk_norm": True,
    "n_group": 1,
    "topk_group": 1,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_FOUR,
        **LINEAR_ATTENTION,
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5": {"text_config": {**_FOUR, **LINEAR_ATTENTION, "model_type": "qwen3_5_text"}},
    "kimi_linear": _KIMI,
    "olmo_hybrid": {**_FOUR, **LINEAR_ATTENTION, "linear_allow_neg_eigval": True, "attention_bias": False},
    "nemotron_h": {
        **COMMON,
        **_MAMBA_2,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "hybrid_override_pattern": list("M*M-"),
        "num_hidden_layers": 4,
        "time_step_limit": (0.0, math.inf),
    },
    "granitemoehybrid": {
        **COMMON,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "falcon_h1": {
        **COMMON,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 1.0,
    },
    "mamba2": {
        **COMMON,
        **_MAMBA_2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.001, 0.5),
        "time_step_rank": "auto",
    },
    "plamo2": {
        **_FOUR,
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "attention_window_size": 2048,
    },
    "mamba": {**COMMON, **_MAMBA_2, "state_size": 8, "time_step_rank": 8},
    "falcon_mamba": {**COMMON, **_MAMBA_2, "state_size": 8, "time_step_rank": 8, "mixer_rms_eps": 1e-6},
    "jamba": {
        **_FOUR,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {
        **COMMON,
        **_LFM,
        "num_hidden_layers": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **COMMON,
        **_LFM,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 1,
    },
    "bailing_moe_linear": _BAILING,
    "bailing_hybrid": {**_BAILING, **_MLA, "routed_scaling_factor": 1.0, "head_dim": 16, "qk_rope_head_dim": 16},
    "bailing_moe_v3": {
        **_BAILING,
        **_MLA,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "recurrent_gemma": {
        **COMMON,
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 64,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "gear": {**COMMON, "num_hidden_layers": 3, "layer_types": ["conv_mixer", "full_attention", "conv_mixer"]},
    "kimi_k3": {
        "text_config": {
            **_KIMI,
            "qk_rope_head_dim": 0,
            "num_key_value_heads": 4,
            "activation_situ_beta": 1.0,
            "num_experts_per_token": 2,
            "linear_attn_config": {**_KIMI["linear_attn_config"], "gate_lower_bound": -5.0},
        }
    },
}


def new_model(family: str, seed: int = 0, **changed: Any) -> Any:
    """A random float32 model of `family`, its configuration `changed`, with decays of all strengths."""
    connect()
    from mlx_lm.utils import _get_classes

    config = {"model_type": family, **RECURRENT[family], **changed}
    model_class, arguments = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map_with_path(_varied, model.parameters()))
    mx.eval(model.parameters())
    return model


def _varied(path: str, weight: Any) -> Any:
    name = path.rpartition(".")[2]
    if name in ("A_log", "dt_bias", "D"):
        return weight + mx.random.normal(weight.shape)
    if weight.ndim == 3 and (weight.shape[2] == 1 or "gate_weight" in name):
        return mx.random.normal(weight.shape) * 0.5
    return weight * 3 if weight.ndim == 2 else weight


def module_of(family: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{family}")
