"""Small random models with heads that the paged kernels take, and how a loader would hand them over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.runner.recurrent.families import RECURRENT, new_model
from tests.support.cuda import ReferenceKernels
from treadle.runner.kv.paged.backend import PagedConfig
from treadle.runner.kv.paged.kernels import Kernels
from treadle.runner.kv.paged.paged_pass import PAGE
from treadle.runner.loading import candidates
from treadle.runner.loading.backend_choice import BackendChoice, Rejection
from treadle.runner.loading.model import LoadedModel
from treadle.runner.loading.reference import Reference
from treadle.runner.mlxlm import connect
from treadle.runner.recurrent.operations import RecurrentOperations

MAX_RUNNING = 8
VOCABULARY = 261
LAYERS, KV_HEADS, DIM = 2, 2, 64
PAGE_BYTES = LAYERS * 2 * KV_HEADS * PAGE * DIM * 4
"""Of float32 keys and values."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LATENT = {
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 128,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_nope_head_dim": 16,
}
"""Keys of 48 and values of 32 dimensions, or latents of 128 with 32 rotated dimensions."""
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama"},
    "llama3": {**_COMMON, "model_type": "llama", "rope_scaling": _LLAMA3_ROPE},
    "llama tied": {**_COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "llama biased": {**_COMMON, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama yarn": {**_COMMON, "model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "llama scaled": {**_COMMON, "model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama traditional": {**_COMMON, "model_type": "llama", "rope_traditional": True},
    "llama windowed": {
        **_COMMON,
        "model_type": "llama",
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2": {**_COMMON, "model_type": "qwen2", "hidden_size": 256},
    "qwen3": {**_COMMON, "model_type": "qwen3"},
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gpt_neox": {
        **_COMMON,
        "model_type": "gpt_neox",
        "hidden_size": KV_HEADS * DIM,
        "num_attention_heads": KV_HEADS,
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
    },
    "gemma3": {
        **_COMMON,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": DIM,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {
        **_COMMON,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
    },
    "gemma2": {**_COMMON, "model_type": "gemma2", "query_pre_attn_scalar": DIM, "attn_logit_softcapping": 2.0},
    "glm4_moe_lite": {**_COMMON, **_LATENT, "model_type": "glm4_moe_lite"},
    "deepseek_v2": {**_COMMON, **_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None, "rope_scaling": _YARN},
}


UNFUSED = "gpt_neox"
"""A model whose layers are not fused."""


def make(name: str, *, dtype: Any = mx.float32, **changed: Any) -> Any:
    """The module, with weights larger than usual for varied greedy text, and biases that are not zero."""
    connect()
    if name in RECURRENT:
        return new_model(name, **changed)
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    config = {**_MODELS[name], **changed}
    model_class, arguments = _get_classes(config)
    module = model_class(arguments.from_dict(config))
    module.update(tree_map_with_path(_louder, module.parameters()))
    module.set_dtype(dtype)
    mx.eval(module.parameters())
    return module


def _louder(path: str, weight: Any) -> Any:
    if path.endswith(".bias"):
        return mx.random.normal(weight.shape)
    return weight * 3 if weight.ndim > 1 else weight + 0.2 * mx.random.normal(weight.shape)


def paged(
    module: Any,
    *,
    pages: int = 256,
    keep_prefixes: bool = True,
    bits: int = 16,
    kernels: type[Kernels] = ReferenceKernels,
    rejected: list[Rejection] | None = None,
) -> PagedConfig:
    """The paged backend of the module, as the loader chooses it, with memory for `pages` pages that are not quantized.
    Raises Unsupported."""
    embedding = next(weight for name, weight in tree_flatten(module.parameters()) if "embed" in name)
    size = mx.float16.size if embedding.dtype == mx.float16 else mx.float32.size
    budget, some = pages * _page_bytes(size), [] if rejected is None else rejected
    reference = Reference(connect(), module, 2048)
    more: dict[str, Any] = {"keep_prefixes": keep_prefixes, "bits": bits, "kernels": kernels}
    if reference.library.windows(module) is None:
        more |= {"recurrences": RecurrentOperations, "max_running": MAX_RUNNING, "step_tokens": 512}
    config = candidates.paged(reference, budget, some, **more)
    return config if config.recurrent is None else replace(config, pages=pages)


def _page_bytes(size: int) -> int:
    return LAYERS * 2 * KV_HEADS * PAGE * DIM * size


def with_config(model: LoadedModel, config: PagedConfig) -> LoadedModel:
    """`model` with another backend."""
    return replace(model, choice=BackendChoice(config, config.cost, 0))


def loaded(module: Any, config: PagedConfig, *, fused: bool = True) -> LoadedModel:
    """`module` with a paged backend; without `fused` its own layers compute."""
    config = config if fused else replace(config, decoder=None)
    return LoadedModel(
        name="random",
        module=module,
        library=connect(),
        architecture="any",
        vocabulary=VOCABULARY,
        context=2048,
        device="cpu",
        dtype="float32",
        parameters=0,
        weight_bytes=0,
        choice=BackendChoice(config, config.cost, 0),
        kv_dtype="float32",
    )
