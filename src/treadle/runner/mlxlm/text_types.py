"""Language models of vision models that were saved alone, with a model type of their own that mlx-lm does not know."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

from .hooks import Rules, sanitizing
from .older_fields import reading
from .vision_text import is_of_vision, text_classes

_OUTER: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "gemma3n_text": "gemma3n",
}
"""The model types whose language model each is."""
_SAME: Mapping[str, str] = {"gemma4_unified_text": "gemma4_text"}
"""Types of which mlx-lm has the model under another name."""
TYPES = frozenset({*_OUTER, *_SAME})


def plain_classes(utils: ModuleType, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes of a model and of its arguments, as they are but for the model type."""
    outer = _OUTER.get(config["model_type"])
    if outer is None:
        return tuple(
            utils._get_classes({**config, "model_type": _SAME.get(config["model_type"], config["model_type"])})
        )
    model, arguments = utils._get_classes({**config, "model_type": outer})
    return model, reading(arguments, partial(_nested, outer))


def classes(utils: ModuleType, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes of a model and of its arguments, for weights in every layout of names."""
    outer = _OUTER.get(config["model_type"])
    named = config if outer is None else {**config, "model_type": outer}
    if not is_of_vision(named):
        model, arguments = plain_classes(utils, config)
        return (_inside(model) if outer else model), arguments
    model, arguments = text_classes(utils, named)
    return model, arguments if outer is None else reading(arguments, partial(_nested, outer))


def _nested(outer: str, params: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model whose language model's is `params`."""
    return {"model_type": outer, "text_config": dict(params)}


def _inside(model: Any) -> Any:
    """Return the class `model`, for the weights of its language model alone."""

    def sanitized(module: Any, own: Rules, weights: dict[str, Any]) -> Mapping[str, Any]:
        bare = {name.removeprefix("model.").removeprefix("language_model."): array for name, array in weights.items()}
        return own({f"model.language_model.{name}": array for name, array in bare.items()})

    return sanitizing(model, sanitized)
