"""Values of a config.json that no model can have: the likely causes of a load that failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL_COUNTS = ("num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings")
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "rope_theta")
_OBJECTS = ("quantization", "quantization_config", "rope_scaling", "rope_parameters")
_LARGEST = 2**31 - 1  # of a dimension in MLX
_SHOWN = 40


def oddities(folder: Path) -> list[str]:
    """Each odd value of the folder's config.json, as `name is value`; empty where there is none or no such file."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    places = [config, config.get("text_config")] if isinstance(config, Mapping) else []
    return [line for place in places if isinstance(place, Mapping) for line in _odd(place)]


def _odd(config: Mapping[str, Any]) -> list[str]:
    """Odd values of one object. What is null counts as not given, except where every model gives it."""
    found = {name: config[name] for name in _COUNTS if name in config and not _is_count(config[name])}
    given = {name: value for name, value in config.items() if value is not None}
    found |= {name: given[name] for name in _OPTIONAL_COUNTS if name in given and not _is_count(given[name])}
    found |= {name: given[name] for name in _NUMBERS if name in given and not _is_above_zero(given[name])}
    found |= {name: given[name] for name in _OBJECTS if name in given and not isinstance(given[name], Mapping)}
    rope = given.get("rope_scaling")
    factor = rope.get("factor", 1) if isinstance(rope, Mapping) else 1
    if not _is_above_zero(factor):
        found["rope_scaling.factor"] = factor
    return [f"{name} is {_short(value)}" for name, value in found.items()]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
