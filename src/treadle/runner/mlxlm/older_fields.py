"""Fields of configurations by the names before transformers 5, where a folder has the later ones alone.

Most classes of mlx-lm and mlx-vlm read the older names. Without them they raise, or take defaults for another rotation
without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_TIED = "tie_word_embeddings"
_ROTATIONS = "rope_parameters"


def with_older_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the older fields of the model and of its language model that it lacks."""
    made, text = _filled(config), config.get("text_config")
    if isinstance(text, Mapping):
        tied = {_TIED: config[_TIED]} if _TIED in config else {}
        made["text_config"] = tied | _filled(text)
    return made


def reading_later_fields(arguments: Any) -> Any:
    """The class of a model's `arguments`, made to read later fields; itself where it does."""
    if _ROTATIONS in inspect.signature(arguments).parameters:
        return arguments
    return reading(arguments, with_older_fields)


def reading(arguments: Any, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The class of a model's `arguments`, made from configurations as they are `changed`."""
    inherited = arguments.from_dict

    def from_dict(cls: Any, params: dict[str, Any]) -> Any:
        return inherited.__func__(cls, changed(params))

    return type(arguments.__name__, (arguments,), {"from_dict": classmethod(from_dict)})


def _filled(part: Mapping[str, Any]) -> dict[str, Any]:
    older = _rotations(part.get(_ROTATIONS))
    if "num_local_experts" in part:
        older["num_experts"] = part["num_local_experts"]
    return older | {name: value for name, value in part.items() if value is not None or name not in older}


def _rotations(later: Any) -> dict[str, Any]:
    """The older fields for rotations, of all layers or by the kinds of layers."""
    if not isinstance(later, Mapping):
        return {}
    full, sliding = later.get("full_attention", later), later.get("sliding_attention", {})
    if not isinstance(full, Mapping) or not isinstance(sliding, Mapping):
        return {}
    older = {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
    kind = full.get("type", full.get("rope_type", "default"))
    if kind != "default" or "mrope_section" in full:
        older["rope_scaling"] = {**full, "type": kind}
    if "rope_theta" in sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    return older
