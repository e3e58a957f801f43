"""Fields of configurations by the names before transformers 5, where a folder has the later ones alone.

Most classes of mlx-lm and mlx-vlm read the older names. Without them they raise, or take defaults for another rotation
without a word.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

_TIED = "tie_word_embeddings"
_ROTATIONS = "rope_parameters"
_RENAMED: Mapping[str, str] = {
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",  # of GPT-NeoX
    "rotary_pct": "partial_rotary_factor",
}
"""Older fields by the names in a later configuration's rotations."""
_BY_TYPE: Mapping[str, Mapping[str, str]] = {
    "step3p5": {
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
    },
    "bailing_hybrid": {
        "num_experts_per_tok": "num_experts_per_token",
        "n_group": "num_expert_group",
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
    },
}
"""Later fields by the older names, by model type: those that transformers 5 saves in place of the published ones."""
_LAYERS: Mapping[str, str] = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds of Granite's layers by their older names."""
_NO_NUMBERS: Mapping[str, float] = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Numbers that JSON does not have, as transformers 5 saves them: `{"__float__": "Infinity"}`."""
_GLOBAL: Mapping[str, str] = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}


def with_older_fields(config: Mapping[str, Any], *, rotations: bool = True) -> dict[str, Any]:
    """`config` with the older fields that it lacks, of the model and of its language model, `rotations` too."""
    made, text = _filled(config, rotations), config.get("text_config")
    if isinstance(text, Mapping):
        tied = {_TIED: config[_TIED]} if _TIED in config else {}
        made["text_config"] = tied | _filled(text, rotations)
    return made


def reading_later_fields(arguments: Any) -> Any:
    """The class of a model's `arguments`, made to read later fields. Rotations are left to a class that reads them."""
    rotations = _ROTATIONS not in inspect.signature(arguments).parameters
    return reading(arguments, partial(with_older_fields, rotations=rotations))


def reading(arguments: Any, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The class of a model's `arguments`, made from configurations as they are `changed`."""
    inherited = arguments.from_dict

    def from_dict(cls: Any, params: dict[str, Any]) -> Any:
        return inherited.__func__(cls, changed(params))

    return type(arguments.__name__, (arguments,), {"from_dict": classmethod(from_dict)})


def _filled(part: Mapping[str, Any], rotations: bool) -> dict[str, Any]:
    part = {name: _number(value) for name, value in part.items()}
    older = _global_heads(part.get("per_layer_config"))
    if rotations:
        older |= _rotations(part.get(_ROTATIONS))
    if "num_local_experts" in part:
        older["num_experts"] = part["num_local_experts"]
    if isinstance(scaling := part.get("rope_scaling"), Mapping):
        older["rope_scaling"] = _spelled(scaling)
        del part["rope_scaling"]
    kind = part.get("model_type")
    older |= {name: part[later] for name, later in _BY_TYPE.get(str(kind), {}).items() if later in part}
    if kind == "step3p5":
        older |= _of_step(part)
    found = older | {name: value for name, value in part.items() if value is not None or name not in older}
    return found | _replaced(part)


def _number(value: Any) -> Any:
    """`value` with what transformers saves for infinite numbers replaced by these, also in a list."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return _NO_NUMBERS.get(str(value["__float__"]), value)
    return value


def _of_step(part: Mapping[str, Any]) -> dict[str, Any]:
    """The older fields for the layers of Step 3.5: their experts, the heads of those with a window, their rotations."""
    older: dict[str, Any] = {}
    if isinstance(kinds := part.get("mlp_layer_types"), list):
        older["moe_layers_enum"] = ",".join(str(layer) for layer, kind in enumerate(kinds) if kind == "sparse")
    if (heads := part.get("num_sliding_attention_heads")) is not None:
        groups = part.get("num_key_value_heads")
        older["attention_other_setting"] = {"num_attention_heads": heads, "num_attention_groups": groups}
    later, layers = part.get(_ROTATIONS), part.get("layer_types")
    if isinstance(later, Mapping) and isinstance(layers, list) and _by_kind(later, layers):
        older["rope_theta"] = [later[kind].get("rope_theta") for kind in layers]
        older["partial_rotary_factors"] = [later[kind].get("partial_rotary_factor", 1.0) for kind in layers]
        older["yarn_only_types"] = ["full_attention"]
    return older


def _by_kind(rotations: Mapping[str, Any], layers: list[Any]) -> bool:
    """Whether each of the kinds of `layers` has rotations of its own."""
    return all(isinstance(kind, str) and isinstance(rotations.get(kind), Mapping) for kind in layers)


def _replaced(part: Mapping[str, Any]) -> dict[str, Any]:
    """Fields whose later values stand under their older names."""
    kind, layers, later = part.get("model_type"), part.get("layer_types"), part.get(_ROTATIONS)
    if kind == "granitemoehybrid" and isinstance(layers, list):
        return {"layer_types": [_LAYERS.get(layer, layer) if isinstance(layer, str) else layer for layer in layers]}
    if kind == "bailing_hybrid" and "linear_head_dim" in part:  # `head_dim` is that of rotations there
        return {"head_dim": part["linear_head_dim"]}
    sliding = part.get("swa_rope_parameters")
    if kind == "laguna" and isinstance(sliding, Mapping) and isinstance(later, Mapping):
        named = {kind: own for kind, own in later.items() if isinstance(own, Mapping)}
        return {_ROTATIONS: {"full_attention": later, "sliding_attention": sliding, **named}}
    return {}


def _spelled(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Scaled rotations whose kind has its older and its later name: some classes know one of them alone."""
    kind = scaling.get("type", scaling.get("rope_type"))
    return dict(scaling) if kind is None else {"type": kind, "rope_type": kind, **scaling}


def _rotations(later: Any) -> dict[str, Any]:
    """The older fields for rotations, of all layers or by the kinds of layers."""
    if not isinstance(later, Mapping):
        return {}
    full, sliding = later.get("full_attention", later), later.get("sliding_attention", {})
    if not isinstance(full, Mapping) or not isinstance(sliding, Mapping):
        return {}
    older = {older: full[name] for older, name in _RENAMED.items() if name in full}
    kind = full.get("type", full.get("rope_type", "default"))
    scaled = kind != "default" or "mrope_section" in full
    older["rope_scaling"] = {**full, "type": kind} if scaled else None  # which some classes ask for
    if "rope_theta" in sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    return older


def _global_heads(layers: Any) -> dict[str, Any]:
    """Heads of Gemma 4's layers without a window, where the configuration has them by the layer."""
    own = [layer for layer in layers.values() if isinstance(layer, Mapping)] if isinstance(layers, Mapping) else []
    return {older: layer[name] for layer in own for older, name in _GLOBAL.items() if name in layer}
