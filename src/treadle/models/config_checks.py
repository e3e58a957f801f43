"""Contradictions in a config.json that no model can have, found before anything is loaded.

mlx-lm loads some of these without an error, and the model's answers are wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FORMATS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
"""Bits and group sizes that MLX has, by the mode of quantization."""

_LAYER_TYPES = frozenset(
    (
        *("full_attention", "sliding_attention", "chunked_attention", "window_attention", "indexed_attention"),
        *("compressed_sparse_attention", "heavily_compressed_attention", "reference_sliding_attention"),
        *("deepseek_sparse_attention", "qwen_sparse_attention", "minimax_m3_sparse", "linear_attention", "attention"),
        *("mamba", "mamba2", "recurrent", "conv", "conv_mixer", "hybrid", "hybrid_sliding"),
        *("moe", "mlp", "sparse", "dense"),
    )
)
"""Types of layers in transformers and mlx-lm. Most of mlx-lm's classes take any other for full attention."""

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
_SCALING = ("rope_scaling", "rope_parameters")
_SHOWN = 40


def faults(config: Mapping[str, Any]) -> list[str]:
    """Each contradiction of the config, with its fields and their values; empty where there is none."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    found = [fault for part in parts for rule in (_experts, _layer_types, _numbers, _caps) for fault in rule(part)]
    return [*found, *_quantization(config.get("quantization"))]


def _experts(config: Mapping[str, Any]) -> Iterator[str]:
    """A token's experts are at least one, and not more than there are. A single expert is a dense layer. Some models
    have a list, by the layer."""
    for name in (*_EXPERTS, *_CHOSEN):
        if isinstance(config.get(name), (str, float, bool)):
            yield f"{name} is {_short(config[name])}, and must be a whole number"
    counts = {name: config[name] for name in _EXPERTS if _is_int(config.get(name))}
    total = next((name for name, count in counts.items() if count > 1), None)
    if total is None:
        return
    extra = config.get("zero_expert_num")
    most = config[total] + (extra if _is_int(extra) else 0)
    for name in _CHOSEN:
        if _is_int(config.get(name)) and not 1 <= config[name] <= most:
            yield f"{name} is {config[name]}, and must be 1 to {most} ({total} is {config[total]})"


def _layer_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Each layer has a type. There may be more types: those of layers for speculation are left out."""
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types is not None and not isinstance(types, list):
        yield f"layer_types is {_short(types)}, and must be a list"
    for place, kind in enumerate(types if isinstance(types, list) else ()):
        if not isinstance(kind, str) or kind not in _LAYER_TYPES:
            yield f"layer_types[{place}] is {_short(kind)}, which is no known type of layers"
            break
    if isinstance(types, list) and _is_int(layers) and len(types) < layers:
        yield f"layer_types has {len(types)} entries, and num_hidden_layers is {layers}: each layer needs one"


def _numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Numbers out of range with which answers would be noise: an epsilon hides what it is added to, and a factor below
    zero turns positions around. Windows have whole tokens. True would count as 1."""
    for name, value in config.items():
        if name.endswith(("window", "window_size")) and isinstance(value, float) and not value.is_integer():
            yield f"{name} is {_short(value)}, and must be a whole number"
        if name in _WINDOWS and value is True:
            yield f"{name} is true, and must be a whole number"
        if name.endswith(("_eps", "_epsilon")) and (value is True or (_is_number(value) and not 0 <= value < 1)):
            yield f"{name} is {_short(value)}, and must be 0 to 1"
    for name in _SCALING:
        scaling = config.get(name)
        factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
        if _is_number(factor) and not 0 < factor < math.inf:
            yield f"{name}.factor is {_short(factor)}, and must be above 0"


def _caps(config: Mapping[str, Any]) -> Iterator[str]:
    """Gemma's code divides by a cap of logits whatever it is: with 0 all of them are equal. Others take 0 for none."""
    if not str(config.get("model_type")).startswith("gemma"):
        return
    for name in _CAPS:
        if _is_number(config.get(name)) and config[name] == 0:
            yield f"{name} is 0, and must be above 0"


def _quantization(given: Any) -> Iterator[str]:
    if given is None or not isinstance(given, Mapping):
        return
    for name in ("group_size", "bits"):
        if name not in given:
            yield f"quantization has no {name}"
    yield from _format("quantization", given)
    for layer, own in given.items():
        if isinstance(own, Mapping):
            yield from _format(f"quantization of {layer}", own)
        elif "." in layer and not isinstance(own, bool) and own is not None:
            yield f"quantization of {layer} is {_short(own)}, and must be an object with bits and group_size, or false"


def _format(place: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Check one entry. A layer's own entry without a mode is affine, whatever the mode of the others."""
    mode = given.get("mode", "affine")
    if not isinstance(mode, str) or mode not in _FORMATS:
        yield f"{place}: mode is {_short(mode)}, and MLX has {', '.join(_FORMATS)}"
        return
    for name, known in zip(("bits", "group_size"), _FORMATS[mode], strict=True):
        if name in given and (given[name] not in known or isinstance(given[name], bool)):
            yield f"{place}: {name} is {_short(given[name])}, and MLX has {', '.join(map(str, known))} in mode {mode}"


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
