"""Fields of configurations by the names before transformers 5, where a folder has the later ones alone.

Most classes of mlx-lm and mlx-vlm read the older names. Without them they raise, or take defaults for another rotation
without a word.
"""

from __future__ import annotations

import inspect
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
    older = _global_heads(part.get("per_layer_config"))
    if rotations:
        older |= _rotations(part.get(_ROTATIONS))
    if "num_local_experts" in part:
        older["num_experts"] = part["num_local_experts"]
    if isinstance(scaling := part.get("rope_scaling"), Mapping):
        older["rope_scaling"] = _spelled(scaling)
        part = {name: value for name, value in part.items() if name != "rope_scaling"}
    return older | {name: value for name, value in part.items() if value is not None or name not in older}


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
