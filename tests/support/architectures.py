"""Tiny configurations of mlx-lm's architectures, and models of them with random weights.

Heads have 64 dimensions where an architecture lets them, and latents 128, so that the CUDA kernels take them. Windows
hold 32 tokens. Fields that an architecture does not have are ignored by mlx-lm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from treadle.runner.mlxlm import connect

Config = dict[str, Any]
WINDOW = 32
COMMON: Config = {
    "vocab_size": 260,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_FOUR: Config = {**COMMON, "num_hidden_layers": 4}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_NO_QKV_BIAS = {"use_bias": False, "use_qkv_bias": False}
_LAYER_NORM = {"layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_TWICE_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
_ROUTED = {
    **_GROUPS,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_DEEPSEEK: Config = {**COMMON, **_ROUTED, **_LATENT}
_INDEXER = {"index_head_dim": 64, "index_n_heads": 8, "index_topk": 48}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_CONVOLUTION = {"conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True}
_MAMBA: Config = {**COMMON, **_CONVOLUTION, "state_size": 8, "time_step_rank": 8}
_KIMI_LINEAR = {
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
    }
}
_LFM2: Config = {
    **COMMON,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_dim": 256,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 96,
}
_GRANITE = {
    **_NO_BIAS,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_LLAMA4 = {
    **_LOCAL_EXPERTS,
    **_NO_BIAS,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "rope_scaling": None,
    "use_qk_norm": True,
    "no_rope_layers": [1, 1, 1, 0],
}
_BAILING: Config = {
    **COMMON,
    **_EXPERTS,
    **_GROUPS,
    **_NO_QKV_BIAS,
    "num_shared_experts": 1,
    "use_qk_norm": True,
}
_LONGCAT: Config = {
    **COMMON,
    **_LATENT,
    "num_layers": 2,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
_MINICPM = {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 1.0}
_GEMMA3 = {"query_pre_attn_scalar": 64, "sliding_window": WINDOW, "sliding_window_pattern": 2}
_SHARED_KV: Config = {
    **COMMON,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 260,
}
_GEMMA3N: Config = {
    **_SHARED_KV,
    "intermediate_size": [128] * 6,
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.0] * 6,
    "query_pre_attn_scalar": 64,
}
_GEMMA4: Config = {**_SHARED_KV, "global_head_dim": 128}
_GPT2 = {"n_ctx": 512, "n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 512, "layer_norm_epsilon": 1e-5}
_MUSE = {
    "post_norm_eps": 1e-5,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.2,
    "layer_rope_theta": [10000.0, 10000.0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_NEMOTRON_H = {
    **_CONVOLUTION,
    **_NO_BIAS,
    **_LAYER_NORM,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "hybrid_override_pattern": list("M*M-"),
    "time_step_limit": (0.0, math.inf),
}

ARCHITECTURES: dict[str, Config] = {
    "Klear": {**COMMON, **_EXPERTS, "attention_bias": False, "n_shared_experts": 1},
    "afm7": {
        **COMMON,
        "hidden_dim": 256,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 0.5,
    },
    "afmoe": {**_FOUR, **_TWICE_SLIDING, **_EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": {**COMMON, **_NO_BIAS, "post_norm": False, "qk_norm": True},
    "baichuan_m1": {**_FOUR, "sliding_window": WINDOW, "sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": {
        **_BAILING,
        **_LATENT,
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "group_norm_size": 2,
    },
    "bailing_moe": _BAILING,
    "bailing_moe_linear": {**_BAILING, "num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {
        **_BAILING,
        **_LATENT,
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 32,
        "short_conv_kernel_size": 4,
    },
    "bitnet": COMMON,
    "cohere": COMMON,
    "cohere2": {**_FOUR, "sliding_window": WINDOW},
    "dbrx": {
        "vocab_size": 260,
        "d_model": 256,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": {**COMMON, **_ROUTED},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy", "rope_scaling": _YARN},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER},
    "deepseek_v41": {
        **_DEEPSEEK,
        **_INDEXER,
        "num_hidden_layers": 4,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 0, 4, 4],
        "index_topk": 512,
    },
    "dots1": {**COMMON, **_ROUTED},
    "ernie4_5": {**COMMON, "use_bias": False},
    "ernie4_5_moe": {
        **COMMON,
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_intermediate_size": 32,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone": {**COMMON, **_LAYER_NORM, "num_layers": 2},
    "exaone4": {**_FOUR, "rope_scaling": None, "sliding_window": WINDOW, "sliding_window_pattern": "LLLG"},
    "exaone_moe": {
        **_FOUR,
        **_EXPERTS,
        **_TWICE_SLIDING,
        "num_shared_experts": 1,
        "is_moe_layer": [False, True, True, True],
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
    "gear": {
        **_FOUR,
        "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        "sliding_window": WINDOW,
    },
    "gemma": COMMON,
    "gemma2": {**COMMON, "query_pre_attn_scalar": 64.0},
    "gemma3": {"vocab_size": 260, "text_config": {**COMMON, **_GEMMA3, "model_type": "gemma3_text"}},
    "gemma3_text": {**COMMON, **_GEMMA3},
    "gemma3n": {"text_config": {**_GEMMA3N, "model_type": "gemma3n"}},
    "gemma4": {"vocab_size": 260, "text_config": {**_GEMMA4, "model_type": "gemma4_text"}},
    "gemma4_text": _GEMMA4,
    "glm": COMMON,
    "glm4": {**COMMON, "attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        **COMMON,
        **_ROUTED,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": {
        **_DEEPSEEK,
        **_INDEXER,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": {**COMMON, **_GPT2},
    "gpt_bigcode": {**COMMON, **_GPT2, "n_inner": 96},
    "gpt_neox": {**COMMON, **_LAYER_NORM, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_oss": {**COMMON, **_LOCAL_EXPERTS, "sliding_window": WINDOW},
    "gptj": {**COMMON, **_GPT2, "rotary_dim": 32},
    "granite": {**COMMON, **_GRANITE},
    "granitemoe": {**COMMON, **_GRANITE, **_LOCAL_EXPERTS},
    "granitemoehybrid": {
        **COMMON,
        **_GRANITE,
        **_LOCAL_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "helium": {**COMMON, **_NO_BIAS},
    "hunyuan": {
        **_FOUR,
        "attention_bias": False,
        "moe_topk": 2,
        "num_experts": 4,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {**COMMON, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": COMMON,
    "internlm3": COMMON,
    "iquestloopcoder": {**COMMON, "loop_num": 2, "loop_window_size": WINDOW},
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
    "kimi_k25": {"text_config": _DEEPSEEK},
    "kimi_k3": {
        "text_config": {
            **_FOUR,
            **_EXPERTS,
            **_LATENT,
            **_KIMI_LINEAR,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
        }
    },
    "kimi_linear": {
        **_FOUR,
        **_EXPERTS,
        **_LATENT,
        **_KIMI_LINEAR,
        "model_max_length": 2048,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
    },
    "kimi_vl": {"text_config": _DEEPSEEK},
    "laguna": {**_FOUR, **_EXPERTS, **_SHARED_EXPERT, **_TWICE_SLIDING},
    "lfm2": _LFM2,
    "lfm2-vl": {"text_config": {**_LFM2, "model_type": "lfm2"}},
    "lfm2_moe": {**_LFM2, **_EXPERTS, "use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": {**COMMON, **_LAYER_NORM, **_GPT2, "block_size": 512, "n_kv_heads": 2},
    "llama": COMMON,
    "llama4": {"text_config": {**COMMON, **_LLAMA4, "model_type": "llama4_text", "floor_scale": 16, "attn_scale": 0.5}},
    "llama4_text": {**COMMON, **_LLAMA4},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "mamba": _MAMBA,
    "mamba2": {
        **_MAMBA,
        **_LAYER_NORM,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "time_step_rank": "auto",
        "time_step_limit": (0.001, 0.5),
    },
    "mellum": {
        **COMMON,
        **_EXPERTS,
        **_SLIDING,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "mimo": COMMON,
    "mimo_v2_flash": {
        **COMMON,
        **_ROUTED,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 64,
        "swa_v_head_dim": 32,
        "v_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {**COMMON, **_MINICPM},
    "minicpm3": {
        **COMMON,
        **_MINICPM,
        **_LATENT,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 2048,
            "long_factor": [1.0] * 16,
            "short_factor": [1.0] * 16,
        },
    },
    "minimax": {**COMMON, **_LOCAL_EXPERTS, "shared_intermediate_size": 32, "rotary_dim": 32},
    "minimax_m3_vl": {
        "text_config": {
            **COMMON,
            **_LOCAL_EXPERTS,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "moe_layer_freq": [0, 1],
            "sparse_attention_freq": [0, 1],
            "index_n_heads": 2,
            "index_head_dim": 64,
            "index_block_size": 16,
            "index_topk_blocks": 3,
        }
    },
    "ministral3": {
        **COMMON,
        **_SLIDING,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1},
    },
    "mistral3": {
        "text_config": {
            **COMMON,
            **_SLIDING,
            "model_type": "ministral3",
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1},
        }
    },
    "mistral4": {**_DEEPSEEK, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    "mixtral": {**COMMON, **_LOCAL_EXPERTS},
    "muse_glimmer": {**COMMON, **_MUSE, **_SLIDING},
    "muse_spark": {
        "text_config": {
            **COMMON,
            **_MUSE,
            **_SLIDING,
            **_LOCAL_EXPERTS,
            "moe_hidden_size": 64,
            "moe_intermediate_size": 32,
        }
    },
    "nanbeige": COMMON,
    "nanochat": COMMON,
    "nemotron": {**COMMON, **_LAYER_NORM, "hidden_act": "relu2"},
    "nemotron-nas": {
        **_FOUR,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.5}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "nemotron_h": {**_FOUR, **_NEMOTRON_H},
    "olmo": {
        "vocab_size": 260,
        "d_model": 256,
        "n_layers": 2,
        "mlp_hidden_size": 192,
        "n_heads": 4,
        "embedding_size": 260,
    },
    "olmo2": COMMON,
    "olmo3": {**_FOUR, "sliding_window": WINDOW},
    "olmo_hybrid": {**_FOUR, **_LINEAR_ATTENTION, "linear_allow_neg_eigval": True, "attention_bias": False},
    "olmoe": {**COMMON, **_EXPERTS},
    "openelm": {
        "vocab_size": 260,
        "head_dim": 64,
        "num_transformer_layers": 2,
        "model_dim": 256,
        "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [0.5, 1.0],
    },
    "phi": {**COMMON, **_LAYER_NORM, "partial_rotary_factor": 0.5},
    "phi3": COMMON,
    "phi3small": {
        **COMMON,
        **_LAYER_NORM,
        "hidden_size": 64,
        "vocab_size": 100352,  # it names tokens beyond 100,000
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
    },
    "phimoe": {
        **COMMON,
        **_LOCAL_EXPERTS,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 32,
            "short_factor": [1.0] * 32,
            "long_mscale": 1.0,
            "short_mscale": 1.0,
        },
    },
    "phixtral": {
        **_LOCAL_EXPERTS,
        "num_vocab": 260,
        "model_dim": 256,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 32,
    },
    "pixtral": {"text_config": {**COMMON, "model_type": "llama"}},
    "plamo": {**COMMON, "n_shared_head": 2},
    "plamo2": {
        **_FOUR,
        "hidden_size_per_head": 64,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "attention_window_size": 2048,
    },
    "plamo3": {**_FOUR, "window_size": WINDOW, "sliding_window_pattern": 2},
    "qwen": {**COMMON, "intermediate_size": 192, "kv_channels": 64},
    "qwen2": COMMON,
    "qwen2_moe": {**COMMON, **_EXPERTS, **_SHARED_EXPERT},
    "qwen2_vl": {"text_config": {**COMMON, "model_type": "qwen2"}},
    "qwen3": COMMON,
    "qwen3_5": {"text_config": {**_FOUR, **_LINEAR_ATTENTION, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {
        "text_config": {**_FOUR, **_LINEAR_ATTENTION, **_EXPERTS, **_SHARED_EXPERT, "model_type": "qwen3_5_moe_text"}
    },
    "qwen3_moe": {**COMMON, **_EXPERTS},
    "qwen3_next": {
        **_FOUR,
        **_LINEAR_ATTENTION,
        **_EXPERTS,
        **_SHARED_EXPERT,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_vl": {"text_config": {**COMMON, "model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {**COMMON, **_EXPERTS, "model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        **COMMON,
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        **COMMON,
        **_LAYER_NORM,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "seed_oss": COMMON,
    "smollm3": _FOUR,
    "solar_open": {**COMMON, **_ROUTED, "partial_rotary_factor": 1.0},
    "spark2_5": {
        **COMMON,
        **_SLIDING,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "stablelm": {**COMMON, **_LAYER_NORM, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "starcoder2": {**COMMON, **_LAYER_NORM},
    "step3p5": {
        **_FOUR,
        **_TWICE_SLIDING,
        "num_attention_groups": 2,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 8,
            "num_attention_groups": 2,
            "head_dim": 64,
        },
    },
    "talkie": COMMON,
    "telechat3": COMMON,
    "youtu_llm": {**COMMON, **_LATENT},
}
"""By the name of mlx-lm's module. `model_type` is the same where it is not given."""
UNAVAILABLE = {
    "bitnet": "its layers have kernels for Metal alone",
    "muse_spark": "its attention has a kernel for Metal alone",
    "olmo": "it needs the package ai2-olmo",
    "prism_hadamard_qwen35": "it takes weights of a packed format alone; its layers are those of qwen3_5",
}
"""Reasons why a model of an architecture can't be made, on Linux."""


def config_of(architecture: str, **changed: Any) -> Config:
    """The tiny configuration of `architecture`, with some fields changed. A second table of embeddings has the size of
    the first: ids behind it would be read from beyond it."""
    config = {"model_type": architecture, **ARCHITECTURES[architecture], **changed}
    if "vocab_size" in changed and "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = changed["vocab_size"]
    return config


def new_module(config: Config, seed: int = 0) -> Any:
    """A module with random float32 weights, larger than usual for varied greedy text. Raises whatever mlx-lm does."""
    connect()
    from mlx.utils import tree_map
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    mx.random.seed(seed)
    module = model_class(arguments.from_dict(config))
    module.update(tree_map(_louder, module.parameters()))
    mx.eval(module.parameters())
    return module


def _louder(weight: Any) -> Any:
    """Weights that are alike until they are read would hide what they are for: experts that are all alike, a
    convolution or a bias that adds nothing, or a norm that scales nothing."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    if weight.ndim > 1:
        return weight * (3 if weight.ndim == 2 else 1) if mx.any(weight).item() else _drawn(weight.shape, weight.dtype)
    if weight.size and mx.all(weight == weight.reshape(-1)[0]).item():
        noise = _drawn(weight.shape, weight.dtype, mx.random.key(weight.size))
        return weight * (1 + noise) if mx.any(weight).item() else noise
    return weight


def _drawn(shape: Any, dtype: Any, key: Any = None) -> Any:
    return mx.random.normal(shape, dtype, key=key) * 0.3


def make_folder(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """Write a model folder without a tokenizer, with random float32 weights."""
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True, exist_ok=True)
    module = new_module(dict(config), seed)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(module.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
