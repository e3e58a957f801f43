"""Facts of model families: the names and the order of a decoder's parts in mlx-lm's modules.

Everything else is read from the modules themselves: sizes, biases, kinds of norms and positions, merged or quantized
weights. Where a fact is wrong, the backend's self-test finds other logits than the module's own, and layers are not
fused. A family belongs here only if its windows are those of its caches: no short trial sees any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from . import delta_facts
from .delta_facts import DeltaFacts
from .kernels import Activation

_PACKAGE = "mlx_lm.models."


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms: before each branch, and after it, before it is added. None where there is none. An MLP
    with experts beside it has one after each of them alone."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    after_mlp_alone: str | None = None
    after_experts: str | None = None


@dataclass(frozen=True)
class Family:
    """A decoder's parts: names are attributes, with dots between them.

    `projections` are those of queries, keys and values, or of all three merged; none where the module's own attention
    is used. `head_norms` are norms of queries and keys. `inputs` of an MLP are gate and up, or merged; or, not `gated`,
    the only one. With `parallel` layers the MLP sees what attention does, and both are added; without a norm of its own
    it shares attention's.

    `mixers` are names of recurrent layers where these are not those of attention. Layers for which `cached` is false
    have no cache, and only an MLP; of `single` ones those with a cache have no MLP. Beside `experts` there may be a
    `shared_mlp`: its name, those of its inputs, and of its way down; without it the layer has the usual MLP.

    Functions get mlx-lm's model: of the `embedding_scale`, the multiplier of branches (`residual_scale`), `logit_scale`
    and `logit_cap` (0: none). `rotates` gets an attention module. `query_scale` gets the model and positions (T,), and
    returns factors (T,) of queries. With `gated_attention` there is a gate behind each query. `delta` gets a mixer with
    a gated delta rule.
    """

    decoder: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    last_norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    mlp: str = "mlp"
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True
    activation: Activation = Activation.SILU
    norms: Norms = Norms()
    parallel: bool = False
    clipped: bool = False
    rotates: Callable[[Any], bool] = lambda attention: _has_rope(attention) and getattr(attention, "use_rope", True)
    embedding_scale: Callable[[Any], float] = lambda model: 1.0
    residual_scale: Callable[[Any], float] = lambda model: 1.0
    logit_scale: Callable[[Any], float] = lambda model: 1.0
    logit_cap: Callable[[Any], float] = lambda model: 0.0
    query_scale: Callable[[Any, Any], Any] | None = None
    mixers: tuple[str, ...] = ()
    cached: Callable[[Any], bool] = lambda layer: True
    single: bool = False
    experts: str = "block_sparse_moe"
    shared_mlp: tuple[str, ...] | None = None
    gated_attention: bool = False
    delta: Callable[[Any], DeltaFacts] | None = None


def _minicpm_residual(model: Any) -> float:
    return float(model.args.scale_depth / model.args.num_hidden_layers**0.5)


def _minicpm_logits(model: Any) -> float:
    return float(model.args.dim_model_base / model.args.hidden_size) if "lm_head" in model else 1.0


def _gemma3_embedding(model: Any) -> float:
    scale: float = mx.array(model.args.hidden_size**0.5, mx.bfloat16).item()  # type: ignore[assignment]
    return scale


def _ministral3_queries(model: Any, positions: Any) -> Any:
    rope = model.args.rope_parameters
    periods = mx.floor(positions / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * mx.log(1 + periods)


def _has_rope(attention: Any) -> bool:
    return attention.get("rope") is not None


_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_LLAMA = Family()
_SPARSE = Family(mlp="block_sparse_moe")
_GEMMA = Family(activation=Activation.GELU, embedding_scale=lambda model: float(model.args.hidden_size**0.5))
_SOFT = replace(_GEMMA, activation=Activation.GELU_TANH, norms=_SANDWICH)
_GRANITE = Family(
    embedding_scale=lambda model: float(model.model.embedding_multiplier),
    residual_scale=lambda model: float(model.args.residual_multiplier),
    logit_scale=lambda model: 1 / float(model.logits_scaling),
)
_COHERE = Family(
    norms=Norms(before_mlp=None), parallel=True, logit_scale=lambda model: float(model.model.args.logit_scale)
)
_MERGED = Family(inputs=("gate_up_proj",))
_LFM2 = Family(
    last_norm="embedding_norm",
    output="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    mlp="feed_forward",
    norms=Norms("operator_norm", None, "ffn_norm"),
    mixers=("conv",),
)
_OWN_ATTENTION = Family(projections=())

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "mimo", "seed_oss", "ernie4_5", "helium"), _LLAMA),
    **dict.fromkeys(("internlm3", "telechat3", "olmoe", "qwen2_moe", "qwen3_moe", "dots1", "exaone_moe"), _LLAMA),
    **dict.fromkeys(("ernie4_5_moe", "glm4_moe", "solar_open", "gpt_oss", "Klear", "mellum"), _LLAMA),
    **dict.fromkeys(("mixtral", "minimax", "phimoe"), _SPARSE),
    **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LLAMA),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), Family(norms=_AFTER)),
    "apertus": Family(norms=Norms("attention_layernorm", None, "feedforward_layernorm")),
    "bailing_moe": Family(
        embedding="word_embeddings",
        attention="attention",
        projections=("query_key_value",),
        output="dense",
        head_norms=("query_layernorm", "key_layernorm"),
    ),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, rotates=lambda attention: bool(attention.use_sliding_window)),
    "exaone": Family(
        decoder="transformer",
        embedding="wte",
        layers="h",
        last_norm="ln_f",
        attention="attn.attention",
        output="out_proj",
        inputs=("c_fc_0", "c_fc_1"),
        down="c_proj",
        norms=Norms("ln_1", None, "ln_2"),
    ),
    "gemma": _GEMMA,
    "gemma2": replace(_SOFT, logit_cap=lambda model: float(model.final_logit_softcapping)),
    "gemma3_text": replace(_SOFT, embedding_scale=_gemma3_embedding, clipped=True),
    "gemma4_text": replace(
        _SOFT,
        norms=replace(
            _SANDWICH,
            after_mlp_alone="post_feedforward_layernorm_1",
            after_experts="post_feedforward_layernorm_2",
        ),
        embedding_scale=lambda model: float(model.model.embed_scale),
        logit_cap=lambda model: float(model.final_logit_softcapping or 0),
    ),
    "glm": _MERGED,
    "glm4": replace(
        _MERGED,
        norms=Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, mlp="block_sparse_moe"),
    "granitemoehybrid": replace(
        _GRANITE, mixers=("mamba",), shared_mlp=("shared_mlp", "input_linear", "output_linear")
    ),
    "hunyuan_v1_dense": _OWN_ATTENTION,
    "internlm2": Family(
        embedding="tok_embeddings",
        head="output",
        attention="attention",
        projections=(),
        mlp="feed_forward",
        inputs=("w1", "w3"),
        down="w2",
        norms=Norms("attention_norm", None, "ffn_norm"),
    ),
    "kimi_linear": Family(delta=delta_facts.kimi_linear),
    "lfm2": replace(_LFM2, inputs=("w1", "w3"), down="w2"),
    "lfm2_moe": _LFM2,
    "minicpm": Family(
        embedding_scale=lambda model: float(model.args.scale_emb),
        residual_scale=_minicpm_residual,
        logit_scale=_minicpm_logits,
    ),
    "ministral3": Family(query_scale=_ministral3_queries),
    "nemotron": Family(inputs=("up_proj",), gated=False, activation=Activation.RELU_SQUARED),
    "nemotron_h": Family(
        decoder="backbone",
        embedding="embeddings",
        last_norm="norm_f",
        attention="mixer",
        mlp="mixer",
        inputs=("up_proj",),
        gated=False,
        activation=Activation.RELU_SQUARED,
        norms=Norms("norm", None, "norm"),
        cached=lambda layer: layer.block_type in "M*",
        single=True,
    ),
    "phi": Family(
        last_norm="final_layernorm",
        output="dense",
        inputs=("fc1",),
        down="fc2",
        gated=False,
        activation=Activation.GELU_TANH,
        norms=Norms(before_mlp=None),
        parallel=True,
    ),
    "phi3": replace(_MERGED, projections=("qkv_proj",)),
    "qwen3_next": Family(mixers=("linear_attn",), gated_attention=True, delta=delta_facts.qwen3_next),
    "qwen3_5": Family(mixers=("linear_attn",), gated_attention=True, delta=delta_facts.qwen3_5),
    "starcoder2": Family(inputs=("c_fc",), down="c_proj", gated=False, activation=Activation.GELU),
}
"""By the name of mlx-lm's module of the model."""


def family_of(model: Any) -> tuple[Any, Family]:
    """The text model inside `model`, and its family. Raises NotImplementedError where it is not known."""
    text = model
    while hasattr(text, "language_model"):
        text = text.language_model
    found = FAMILIES.get(type(text).__module__.removeprefix(_PACKAGE))
    if found is None:
        raise NotImplementedError(f"there is no fused decoder for {type(model).__module__}")
    return text, found


def part(module: Any, path: str) -> Any:
    """The attribute of `module` at a dotted `path`."""
    for name in path.split("."):
        module = getattr(module, name)
    return module
