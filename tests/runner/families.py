"""Tiny random models of families whose caches differ: recurrent, hybrid, lists of caches, chunked, compressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_configs import EXPERTS, LINEAR_ATTENTION, TEXT
from treadle.runner.mlxlm import connect

COMMON: dict[str, Any] = {**TEXT, "vocab_size": 260}
_EVERY_FOURTH = {"num_hidden_layers": 4}
"""Where each fourth layer is of another kind."""
LATENT = {
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
}
_ROUTED = {
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "topk_group": 1,
    "n_group": 1,
    "first_k_dense_replace": 0,
}
_YARN = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
_LLAMA4 = {
    "attention_bias": False,
    "attention_chunk_size": 32,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "rope_scaling": None,
    "use_qk_norm": True,
    "model_type": "llama4_text",
}

FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": {
        **COMMON,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "qwen3_next": {
        **COMMON,
        **_EVERY_FOURTH,
        **LINEAR_ATTENTION,
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
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
    "smollm3": {**COMMON, **_EVERY_FOURTH},
    "gpt_oss": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "deepseek_v3": {**COMMON, **LATENT},
    "glm4_moe_lite": {**COMMON, **LATENT},
    "mistral4": {**COMMON, **LATENT, **_ROUTED, "rope_parameters": _YARN},
    "kimi_k25": {"text_config": {**COMMON, **LATENT}},
    "deepseek_v2": {**COMMON, **LATENT, "q_lora_rank": None, "rope_scaling": _YARN},
    "gemma2": {**COMMON, "query_pre_attn_scalar": 16.0},
    "llama4": {"text_config": {**COMMON, **_EVERY_FOURTH, **_LLAMA4}},
    "deepseek_v41": ARCHITECTURES["deepseek_v41"],
}


def make_family(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a model folder of `family` with random float32 weights, larger than usual for varied greedy text."""
    connect()
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.utils import _get_classes

    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, **FAMILIES[family]}
    model_class, arguments = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(arguments.from_dict(config))
    weights = tree_map(lambda w: w * 3 if w.ndim == 2 else w, model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(weights)), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
