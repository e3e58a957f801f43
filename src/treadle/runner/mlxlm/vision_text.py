"""Language models of vision models by mlx-lm, from folders in every layout of names (`runner/vision_names`).

For SmolVLM, Idefics 3 and LFM2-VL the model type gets a name of mlx-lm's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ..vision_names import HEAD, TEXT, names_of
from .hooks import Rules, sanitizing
from .older_fields import reading

_SMOLVLM = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
}
"""What SmolVLM's configurations leave out where it is so."""
_OWN_TYPES: Mapping[str, str] = {"smolvlm": "mistral3", "idefics3": "mistral3", "lfm2_vl": "lfm2-vl"}


def is_of_vision(config: Mapping[str, Any]) -> bool:
    """Whether `config` is of a vision model whose names of tensors are known."""
    return names_of(config) is not None


def text_classes(utils: ModuleType, config: Mapping[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes of the language model and of its arguments, for the `config` of a vision model."""
    own, names = _OWN_TYPES.get(config["model_type"]), names_of(config)
    assert names is not None, "is_of_vision has been asked"
    model, arguments = utils._get_classes({**config, "model_type": own} if own else config)

    def sanitized(module: Any, rules: Rules, weights: dict[str, Any]) -> Mapping[str, Any]:
        found = names.of_text(weights)
        if own is None:
            return rules({**_placeholders(config, found), **found})
        inner = module.language_model.sanitize({name.removeprefix(TEXT): array for name, array in found.items()})
        return {f"{TEXT}{name}": array for name, array in inner.items()}

    return sanitizing(model, sanitized), arguments if own is None else reading(arguments, _with_own_type)


def _placeholders(config: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """What mlx-lm's rules for a model's weights look up without need, where it is not there."""
    headless = not any(name.startswith(HEAD) for name in weights)
    return {HEAD.removesuffix("."): {}} if headless and config["model_type"] == "qwen3_vl_moe" else {}


def _with_own_type(params: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the model type that mlx-lm has for it."""
    return {**params, "model_type": _OWN_TYPES[params["model_type"]], "text_config": _text_config(params)}


def _text_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's configuration, with what it leaves out."""
    text = dict(params["text_config"])
    if params["model_type"] == "lfm2_vl":
        return text
    text = {**_SMOLVLM, "tie_word_embeddings": params.get("tie_word_embeddings", False), **text, "model_type": "llama"}
    if not text.get("num_attention_heads"):
        text["num_attention_heads"] = text["hidden_size"] // text["head_dim"] if text.get("head_dim") else 32
    return text
