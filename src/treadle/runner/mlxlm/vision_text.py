"""Language models of vision models whose checkpoints mlx-lm does not read by itself: SmolVLM, Idefics 3 and LFM2-VL.

Their language models are mlx-lm's. What is added are names: of the model type, and of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

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
Rename = Callable[[str], str]


def _llama_name(name: str) -> str:
    name = name.removeprefix("model.").replace("text_model.", "language_model.", 1)
    name = name.removeprefix("language_model.")
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"


def _lfm2_name(name: str) -> str:
    name = name.removeprefix("model.").removeprefix("language_model.")
    return name if name.startswith("model.") else f"model.{name}"


_RENAMED: Mapping[str, tuple[str, Rename]] = {
    "smolvlm": ("mistral3", _llama_name),
    "idefics3": ("mistral3", _llama_name),
    "lfm2_vl": ("lfm2-vl", _lfm2_name),
}
_OF_TOWERS = ("vision_model.", "vision_tower.", "connector.", "multi_modal_projector.")


def renames(config: Mapping[str, Any]) -> bool:
    """Whether the model of `config` is read by names that are added here."""
    return config.get("model_type") in _RENAMED


def text_classes(utils: ModuleType, config: Mapping[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes of the model and of its arguments, for such a `config`."""
    own, rename = _RENAMED[config["model_type"]]
    model, arguments = utils._get_classes({**config, "model_type": own})

    def sanitize(self: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: array for name, array in weights.items() if not _of_tower(name)}
        found = self.language_model.sanitize({rename(name): array for name, array in kept.items()})
        return {f"language_model.{name}": array for name, array in found.items()}

    inherited = arguments.from_dict

    def from_dict(cls: Any, params: dict[str, Any]) -> Any:
        return inherited({**params, "model_type": own, "text_config": _text_config(params)})

    made = type(arguments.__name__, (arguments,), {"from_dict": classmethod(from_dict)})
    named = {"sanitize": sanitize, "__module__": model.__module__}  # by which its kind is known
    return type(model.__name__, (model,), named), made


def _of_tower(name: str) -> bool:
    return name.removeprefix("model.").startswith(_OF_TOWERS)


def _text_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's configuration, with what it leaves out."""
    text = dict(params["text_config"])
    if params["model_type"] == "lfm2_vl":
        return text
    text = {**_SMOLVLM, "tie_word_embeddings": params.get("tie_word_embeddings", False), **text, "model_type": "llama"}
    if not text.get("num_attention_heads"):
        text["num_attention_heads"] = text["hidden_size"] // text["head_dim"] if text.get("head_dim") else 32
    return text
