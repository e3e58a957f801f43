"""Scaled rotary positions (RoPE) that a configuration asks for and mlx-lm's class of the model does not read.

Positions beyond the length that a model was trained for need other frequencies: YaRN (Peng et al., 2023), those of
Llama 3.1, LongRoPE (Ding et al., 2024), or positions divided by a factor. A class that does not know the field turns by
plain ones without a word. transformers and vLLM scale those of every architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.nn as nn

from .axes import rotations_of
from .older_fields import with_older_fields

_KINDS = ("linear", "llama3", "yarn", "longrope")
_LENGTH = "max_position_embeddings"
_TRAINED = "original_max_position_embeddings"
_LOCAL = "rope_local_base_freq"


def scaling(model: Any, config: Mapping[str, Any]) -> Any:
    """Return the class `model`, whose rotations are scaled as `config` says where it leaves all of them plain. Where
    windows have rotations of their own, it is not known which are to be scaled."""
    wanted = _wanted(config)
    if wanted is None or wanted["type"] not in _KINDS or wanted[_LOCAL]:
        return model

    def begin(self: Any, *args: Any) -> None:
        model.__init__(self, *args)
        if _are_plain(self) and _fits(rotations_of(self), wanted["type"]):
            _scale(self, wanted)

    return type(model.__name__, (model,), {"__init__": begin, "__module__": model.__module__})


def ignored(model: Any, config: Mapping[str, Any]) -> str:
    """Return the kind of scaled rotations that `config` asks for where those of `model` are plain; else nothing."""
    wanted = _wanted(config)
    return "" if wanted is None or not _are_plain(model) else str(wanted["type"])


def _wanted(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how rotations are to be scaled, with the length before it; None where they are plain, or those of axes."""
    made = with_older_fields(config)
    text = made.get("text_config")
    part = text if isinstance(text, Mapping) else made
    found = part.get("rope_scaling")
    if not isinstance(found, Mapping) or "mrope_section" in found:
        return None
    kind = found.get("type") or found.get("rope_type") or "default"
    if kind in ("default", "mrope") or (kind == "linear" and found.get("factor") == 1):
        return None
    lengths = {_LENGTH: part[_LENGTH], _TRAINED: part.get(_TRAINED) or part[_LENGTH]} if _LENGTH in part else {}
    return {**lengths, **found, "type": kind, _LOCAL: _LOCAL in part}


def _are_plain(model: Any) -> bool:
    found = rotations_of(model)
    return bool(found) and all(type(one) is nn.RoPE and one.scale == 1.0 for one in found)


def _fits(rotations: Sequence[Any], kind: str) -> bool:
    """Whether all are of one kind. mlx-lm's LongRoPE turns pairs that are half of the dimensions apart alone."""
    return len({one.base for one in rotations}) == 1 and not (kind == "longrope" and rotations[0].traditional)


def _scale(model: Any, wanted: dict[str, Any]) -> None:
    from mlx_lm.models.rope_utils import initialize_rope  # which `connect` has imported, and checked

    plain = {id(one) for one in rotations_of(model)}
    for _, module in model.named_modules():
        for name, one in module.children().items():
            if id(one) in plain:
                scaled = initialize_rope(one.dims, one.base, one.traditional, wanted, wanted.get(_LENGTH))
                setattr(module, name, scaled)
