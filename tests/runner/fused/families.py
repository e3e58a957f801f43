"""Tiny random models of the families that have fused layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from treadle.runner.mlxlm import connect

VOCABULARY = 260
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
}
_WINDOW: dict[str, Any] = {
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.5}
_LONG = {
    "type": "longrope",
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 32,
    "long_factor": [1.0 + i / 8 for i in range(32)],
}
_MELLUM = {name: {"rope_theta": 10000.0, "rope_type": "default"} for name in _WINDOW["layer_types"]}
_GEMMA4 = {
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "tie_word_embeddings": True,
    **_WINDOW,
}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 2,
    "kv_lora_rank": 128,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "moe_layer_freq": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": _YARN},
    "llama traditional": {"rope_traditional": True},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "mimo": {"num_nextn_predict_layers": 0},
    "seed_oss": {"attention_out_bias": False},
    "ernie4_5": {"use_bias": True},
    "helium": {},
    "internlm3": {"bias": True, "qkv_bias": True},
    "telechat3": {},
    "olmoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "dots1": _EXPERTS,
    "exaone_moe": {**_EXPERTS, **_WINDOW, "is_moe_layer": [False, True]},
    "ernie4_5_moe": {**_EXPERTS, "use_bias": False, "moe_num_experts": 4, "moe_k": 2},
    "glm4_moe": _EXPERTS,
    "gpt_oss": {**_EXPERTS, **_WINDOW, "rope_scaling": _YARN},
    "Klear": {**_EXPERTS, "qkv_bias": False},
    "mellum": {**_EXPERTS, **_WINDOW, "rope_parameters": _MELLUM},
    "deepseek": {**_EXPERTS, "moe_layer_freq": 1},
    "deepseek_v2": {**_LATENT, "rope_scaling": {**_YARN, "mscale_all_dim": 0.5}},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "mixtral": _EXPERTS,
    "solar_open": _EXPERTS,
    "minimax": {**_EXPERTS, "shared_intermediate_size": 32, "rotary_dim": 32},
    "phimoe": {**_EXPERTS, "rope_scaling": _LONG, "original_max_position_embeddings": 64},
    "olmo2": {},
    "olmo3": _WINDOW,
    "exaone4": {**_WINDOW, "sliding_window_pattern": "LG"},
    "apertus": {"qk_norm": True, "post_norm": False, "mlp_bias": False, "attention_bias": False},
    "bailing_moe": {
        **_EXPERTS,
        "use_bias": False,
        "use_qkv_bias": True,
        "norm_head": False,
        "norm_softmax": False,
        "moe_router_enable_expert_bias": True,
    },
    "cohere": {"logit_scale": 0.5, "num_attention_heads": 2},
    "cohere2": {**_WINDOW, "logit_scale": 0.5},
    "exaone": {"num_layers": 2, "layer_norm_epsilon": 1e-5},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 32},
    "gemma4_text": {**_EXPERTS, **_GEMMA4},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, **_EXPERTS},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "internlm2": {"bias": False},
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 6.0},
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        }
    },
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_key_value_heads": 1},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 1},
    "phi3": {"rope_scaling": _LONG, "original_max_position_embeddings": 64},
    "starcoder2": {},
}


def config_of(name: str) -> dict[str, Any]:
    """The family's config.json."""
    return {"model_type": name.split()[0], **_COMMON, **FAMILIES.get(name, {})}


def make(name: str, *, dtype: Any = mx.float32, **changed: Any) -> Any:
    """The random module, loud enough that every part of it shows in the logits."""
    connect()
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    config = {**config_of(name), **changed}
    model_class, arguments = _get_classes(config)
    module = model_class(arguments.from_dict(config))
    module.update(tree_map_with_path(_louder, module.parameters()))
    module.set_dtype(dtype)
    mx.eval(module.parameters())
    return module


def _louder(path: str, weight: Any) -> Any:
    if path.endswith("bias"):
        return weight + mx.random.normal(weight.shape)
    return weight * 3 if weight.ndim > 1 else weight + 0.2 * mx.random.normal(weight.shape)
