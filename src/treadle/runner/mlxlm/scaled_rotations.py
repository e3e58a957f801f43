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
from .hooks import derived
from .older_fields import with_older_fields

_KINDS = ("linear", "llama3", "yarn", "longrope")
_LENGTH = "max_position_embeddings"
_TRAINED = "original_max_position_embeddings"
_LOCAL = "rope_local_base_freq"


def scaling(model: Any, config: Mapping[str, Any]) -> Any:
    """Return the class `model`, whose rotations are scaled as `config` says where it leaves all of them plain. Where
    windows have rotations of their own, it is not known which are to be scaled."""
    text = _text(config)
    wanted = _wanted(text)
    if wanted is None or wanted["type"] not in _KINDS or _LOCAL in text:
        return model

    def begin(self: Any, *args: Any) -> None:
        model.__init__(self, *args)
        plain = _plain(self)
        if _fit(plain, wanted["type"]):
            _scale(self, plain, wanted)

    return derived(model, {"__init__": begin})


def ignored(model: Any, config: Mapping[str, Any]) -> str:
    """Return the kind of scaled rotations that `config` asks for where those of `model` are plain; else nothing."""
    wanted = _wanted(_text(config))
    return str(wanted["type"]) if wanted is not None and _plain(model) else ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model, by the older names."""
    made = with_older_fields(config)
    text = made.get("text_config")
    return text if isinstance(text, Mapping) else made


def _wanted(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how rotations are to be scaled, with the length before it; None where they are plain, or those of axes."""
    found = text.get("rope_scaling")
    if not isinstance(found, Mapping) or "mrope_section" in found:
        return None
    kind = found.get("type") or found.get("rope_type") or "default"
    if kind in ("default", "mrope") or (kind == "linear" and found.get("factor") == 1):
        return None
    lengths = {_LENGTH: text[_LENGTH], _TRAINED: text.get(_TRAINED) or text[_LENGTH]} if _LENGTH in text else {}
    return {**lengths, **found, "type": kind}


def _plain(model: Any) -> list[Any]:
    """Return the rotations of `model` if all are plain; else none."""
    found = rotations_of(model)
    return found if all(type(one) is nn.RoPE and one.scale == 1.0 for one in found) else []


def _fit(rotations: Sequence[Any], kind: str) -> bool:
    """Whether all are of one kind. mlx-lm's LongRoPE turns pairs that are half of the dimensions apart alone."""
    return len({one.base for one in rotations}) == 1 and not (kind == "longrope" and rotations[0].traditional)


def _scale(model: Any, rotations: Sequence[Any], wanted: dict[str, Any]) -> None:
    from mlx_lm.models.rope_utils import initialize_rope  # which `connect` has imported, and checked

    plain = {id(one) for one in rotations}
    for _, module in model.named_modules():
        for name, one in module.children().items():
            if id(one) in plain:
                scaled = initialize_rope(one.dims, one.base, one.traditional, wanted, wanted.get(_LENGTH))
                setattr(module, name, scaled)
