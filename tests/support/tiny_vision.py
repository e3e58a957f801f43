"""Tiny random vision models: a folder for each family, with weights under mlx-vlm's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from tests.support.tiny_configs import EXPERTS, LINEAR_ATTENTION, TEXT
from treadle.runner.mlxvlm import connect, family_of

IMAGE = 250
"""The id of image tokens."""
BREAK = 249
START, END, VIDEO = 248, 247, 246
SIDE = 8
"""Side of a patch, in pixels."""
_TEXT = {**TEXT, "num_hidden_layers": 3}
_QWEN_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": SIDE,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "vocab_size": 256,
}
_SIGLIP = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "patch_size": SIDE,
    "num_channels": 3,
}
_PIXTRAL_VISION = {
    **_SIGLIP,
    "model_type": "pixtral",
    "head_dim": 16,
    "image_size": 96,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
_QWEN3_5: dict[str, Any] = {
    **_QWEN,
    "text_config": {
        **_TEXT,
        **LINEAR_ATTENTION,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "head_dim": 32,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "vision_config": {
        **_QWEN_VISION,
        "model_type": "qwen3_5",
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [],
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_QWEN,
        **{key: value for key, value in _TEXT.items() if key != "head_dim"},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen2_vl", "embed_dim": 32, "hidden_size": 64},
    },
    "qwen2_5_vl": {
        **_QWEN,
        **{key: value for key, value in _TEXT.items() if key != "head_dim"},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {
            **_QWEN_VISION,
            "model_type": "qwen2_5_vl",
            "window_size": 32,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "qwen3_vl": {
        **_QWEN,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": {
            **_QWEN_VISION,
            "model_type": "qwen3_vl",
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
    },
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": {
        **_QWEN3_5,
        "text_config": {
            **_QWEN3_5["text_config"],
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "model_type": "qwen3_5_moe_text",
        },
        "vision_config": {**_QWEN3_5["vision_config"], "model_type": "qwen3_5_moe"},
    },
    "qwen3_vl_moe": {
        **_QWEN,
        "text_config": {
            **_TEXT,
            **EXPERTS,
            "model_type": "qwen3_vl_moe_text",
            "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": {
            **_QWEN_VISION,
            "model_type": "qwen3_vl_moe",
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [1],
        },
    },
    "gemma3": {
        "image_token_index": IMAGE,
        "hidden_size": 64,
        "vocab_size": 256,
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "rope_theta": 1000000.0,
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": 9,
            "query_pre_attn_scalar": 16,
        },
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 6 * SIDE},
    },
    "gemma4": {
        "image_token_id": IMAGE,
        "vocab_size": 256,
        "text_config": {
            **_TEXT,
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 256,
            "sliding_window": 64,
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **_SIGLIP,
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "default_output_length": 12,
            "position_embedding_size": 32,
            "pooling_kernel_size": 2,
        },
    },
    "mistral3": {
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": _PIXTRAL_VISION,
    },
    "pixtral": {
        "image_token_index": IMAGE,
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": _PIXTRAL_VISION,
    },
    "llava": {
        "image_token_index": IMAGE,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "clip_vision_model", "image_size": 4 * SIDE},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "smolvlm": {
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "smolvlm_vision", "image_size": 4 * SIDE},
    },
    "idefics3": {
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_SIGLIP, "model_type": "idefics3_vision", "image_size": 4 * SIDE},
    },
    "lfm2_vl": {
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "projector_hidden_size": 48,
        "text_config": {
            **_TEXT,
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_ffn_dim_multiplier": 1.0,
            "block_dim": 64,
            "conv_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 32,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1],
            "layer_types": ["conv", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
        "vision_config": {**_SIGLIP, "model_type": "lfm2_vl", "num_patches": 16, "layer_norm_eps": 1e-6},
    },
}
FAMILIES = tuple(CONFIGS)


def config_of(family: str) -> dict[str, Any]:
    """The configuration of a family's tiny model, as it stands in config.json."""
    config = {"model_type": family, "eos_token_id": 255, **CONFIGS[family]}
    return json.loads(json.dumps(config))


def make_reference(family: str, seed: int = 0) -> Any:
    """mlx-vlm's own model with random weights, larger than usual so that greedy text varies."""
    config = config_of(family)
    mx.random.seed(seed)
    found = family_of(config)
    assert found is not None
    model = connect(found).new_model(config)
    model.update(tree_map(_spread, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _spread(array: Any) -> Any:
    return array * 3.0 if array.ndim > 1 else array + 0.1 * mx.random.normal(array.shape)


def make_vision(
    folder: Path, family: str, *, bits: int = 0, seed: int = 0, without: str = "", more: Mapping[str, Any] | None = None
) -> Path:
    """Write a model folder. With `bits` linear layers are quantized, those of the tower too where they can be. Tensors
    that have `without` in their names are left out; `more` are fields of config.json."""
    config = {**config_of(family), **(more or {})}
    model = make_reference(family, seed)
    if bits:
        nn.quantize(model, 32, bits, class_predicate=quantizable)
        config["quantization"] = {"group_size": 32, "bits": bits}
    weights = {name: array for name, array in tree_flatten(model.parameters()) if not (without and without in name)}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantizable(path: str, module: Any) -> bool:
    """Whether a layer of a model is quantized."""
    return isinstance(module, nn.Linear) and module.weight.shape[-1] % 32 == 0


def pixels_of(family: str, seed: int, size: int = 0) -> tuple[np.ndarray, tuple[tuple[int, ...], ...], int]:
    """Random pixels of an image, its grid, and how many tokens stand for it. `size` chooses among those that the family
    has, where images may differ."""
    rows, columns = ((4, 6), (2, 4), (6, 6))[size % 3]
    chance = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return chance.normal(size=shape).astype(np.float32)

    match family:
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":
            return draw(rows * columns, 3 * 2 * SIDE * SIDE), ((1, rows, columns),), rows * columns // 4
        case "gemma3":
            return draw(1, 3, 6 * SIDE, 6 * SIDE), (), 9
        case "gemma4":
            shape = (1, 3, rows * SIDE, columns * SIDE)
            return np.abs(draw(*shape)) % 1.0, ((rows, columns),), rows * columns // 4
        case "mistral3":
            return draw(1, 3, rows * SIDE, columns * SIDE), ((rows * SIDE, columns * SIDE),), rows * columns // 4
        case "pixtral":
            return draw(1, 3, rows * SIDE, columns * SIDE), ((rows * SIDE, columns * SIDE),), rows * columns
        case "llava":
            return draw(1, 3, 4 * SIDE, 4 * SIDE), (), 16
        case "smolvlm" | "idefics3":
            views = size % 3 + 1
            return draw(views, 3, 4 * SIDE, 4 * SIDE), (), 4 * views
        case "lfm2_vl":
            shapes = (((4, 4), (2, 4)), ((2, 4),), ((4, 2), (4, 4), (2, 2)))[size % 3]
            pixels = draw(len(shapes), 16, 3 * SIDE * SIDE)
            for view, (high, wide) in enumerate(shapes):
                pixels[view, high * wide :] = 0.0
            return pixels, shapes, sum(high * wide // 4 for high, wide in shapes)
    raise AssertionError(family)
