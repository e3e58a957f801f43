"""Layouts in which transformers saves vision models, for those of `tiny_vision`: names and configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.tiny_vision import config_of, make_vision

_TOWERS = ("vision_tower.", "multi_modal_projector.", "vision_model.", "connector.", "embed_vision.")
Rename = Callable[[str, str], str | None]


def _part(name: str) -> tuple[str, str]:
    """Whether one of mlx-vlm's names is of the "tower", the "head" or the "text", and the name within the latter."""
    if name.startswith(_TOWERS):
        return "tower", name
    inner = name.removeprefix("language_model.")
    return ("head", inner) if inner.startswith("lm_head.") else ("text", inner.removeprefix("model."))


def _tower(family: str, name: str) -> str:
    if family.startswith("qwen"):
        return name.replace("vision_tower.", "visual.", 1)
    return name.replace(".vision_model.", ".", 1) if family in ("mistral3", "pixtral") else name


LAYOUTS: dict[str, dict[str, str]] = {
    "ForConditionalGeneration": {"tower": "model.{name}", "head": "{name}", "text": "model.{text}.{name}"},
    "AutoModel": {"tower": "{name}", "head": "{name}", "text": "{text}.{name}"},
    "before 4.52": {"tower": "{name}", "head": "{text}.{name}", "text": "{text}.model.{name}"},
    "Qwen before 4.52": {"tower": "{name}", "head": "{name}", "text": "model.{name}"},
    "5.5": {"tower": "model.{text}.{name}", "head": "{name}", "text": "model.{text}.{text}.{text}.{name}"},
}
"""Names of the three parts by the class or the release of transformers that saved them."""


def rename(weights: dict[str, Any], family: str, layout: str) -> dict[str, Any]:
    """Tensors by transformers' names, and in its arrangement, for those of mlx-vlm."""
    text = "text_model" if family in ("smolvlm", "idefics3") else "language_model"
    made = {}
    for full, array in weights.items():
        part, name = _part(full)
        if part == "tower":
            name = _tower(family, name)
            if array.ndim > 3:  # the kernel of a convolution
                array = mx.contiguous(array.transpose(0, array.ndim - 1, *range(1, array.ndim - 1)))
        made[LAYOUTS[layout][part].format(name=name, text=text)] = array
    return made


def make_saved(folder: Path, family: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Write a family's folder with `change`d weights."""
    file = make_vision(folder, family) / "model.safetensors"
    weights: dict[str, Any] = dict(mx.load(str(file)))  # type: ignore[arg-type]
    mx.save_safetensors(str(file), change(weights), metadata={"format": "pt"})
    return folder


def later_config(family: str) -> dict[str, Any]:
    """A family's configuration as transformers 5 writes it."""
    config = config_of(family)
    text, vision = config.pop("text_config", None), config.pop("vision_config")
    if text is None:  # flat
        kept = [name for name in config if name in ("model_type", "eos_token_id") or name.endswith("_token_id")]
        config, text = (
            {name: config[name] for name in kept},
            {name: config[name] for name in config if name not in kept},
        )
    rotation = {"rope_type": "default", **text.pop("rope_scaling", {}), "rope_theta": text.pop("rope_theta")}
    if family == "gemma3":
        rotation = {"full_attention": rotation, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
    if family.startswith("qwen"):
        vision["model_type"] = f"{family}_vision"
    tied = text.pop("tie_word_embeddings")
    text |= {"model_type": text.get("model_type", f"{family}_text"), "rope_parameters": rotation}
    return {**config, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
