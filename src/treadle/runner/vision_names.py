"""Names of tensors in folders of vision models, in each layout that transformers and mlx-vlm save.

A part of a model is nested in others by the class and the release of transformers that saved it: the language model of
a Qwen-VL is `model.layers.0`, `model.language_model.layers.0`, `language_model.layers.0` (by `AutoModel`) or
`model.language_model.language_model.language_model.layers.0` (by releases of transformers 5), and mlx-vlm's is
`language_model.model.layers.0`. Towers differ likewise. Here all of them get mlx-vlm's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TEXT = "language_model."
EMBEDDINGS = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head."
_NESTED = ("model.", "language_model.", "text_model.")
_OF_TEXT = (
    "layers.",
    "embed_tokens.",
    "norm.",
    "embedding_norm.",
    "embed_tokens_per_layer.",
    "per_layer_",
    "rotary_emb.",
)
_BESIDE = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "embed_vision."),
    *("audio_tower.", "embed_audio.", "image_newline", "mtp."),
)
"""Parts beside the language model, by mlx-vlm's names, and MTP heads."""


@dataclass(frozen=True)
class _Layout:
    """Names of a family's tower: `renamed` are its parts by other names, of which the first that fits counts. Where a
    configuration does not say whether the output head is the embedding, `tied` does, as in mlx-lm."""

    renamed: Mapping[str, str]
    tied: bool = False


_QWEN = _Layout({"visual.": "vision_tower."})
_INSIDE = {"vision_tower.vision_model.": "vision_tower.vision_model.", "vision_tower.": "vision_tower.vision_model."}
_MISTRAL = {
    **_INSIDE,
    "vision_encoder.": "vision_tower.vision_model.",
    "vision_projection.": "multi_modal_projector.",
}
_LFM2 = _Layout({"vision_tower.vision_model.": "vision_tower."}, tied=True)
_LAYOUTS: Mapping[str, _Layout] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": _Layout(_INSIDE, tied=True),
    "gemma4": _Layout({}, tied=True),
    **dict.fromkeys(("mistral3", "pixtral", "llava"), _Layout(_MISTRAL)),
    "smolvlm": _Layout({}),
    "idefics3": _Layout({}),
    "lfm2_vl": _LFM2,
    "lfm2-vl": _LFM2,
}


class VisionNames:
    """Names of a family's tensors. Make it with `names_of`."""

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout

    def known(self, name: str) -> str | None:
        """mlx-vlm's name of a tensor that has `name` in some layout; None where that is of no layout."""
        bare = name
        while (nested := next((part for part in _NESTED if bare.startswith(part)), "")) and bare != nested:
            bare = bare.removeprefix(nested)
        if bare.startswith("lm_head."):
            return TEXT + bare
        for other, own in self._layout.renamed.items():
            if bare.startswith(other):
                return own + bare.removeprefix(other)
        if bare.startswith(_BESIDE):
            return bare
        return f"{TEXT}model.{bare}" if bare.startswith(_OF_TEXT) else None

    def rename(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """`weights` by mlx-vlm's names; those of no layout keep theirs."""
        return {self.known(name) or name: array for name, array in weights.items()}

    def of_text(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The language model's part of `weights`, and what has names of no layout."""
        return {name: array for name, array in self.rename(weights).items() if not name.startswith(_BESIDE)}

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are of no layout."""
        return [name for name in names if self.known(name) is None]

    def is_tied(self, config: Mapping[str, Any]) -> bool:
        """Whether the output head is the embedding, by a model's configuration."""
        text = config.get("text_config")
        parts = [text, config] if isinstance(text, Mapping) else [config]
        said = [part[name] for part in parts for name in ("tie_word_embeddings", "tie_embedding") if name in part]
        return any(said) if said else self._layout.tied


def names_of(config: Mapping[str, Any]) -> VisionNames | None:
    """The names of tensors of a vision model, by its configuration; None where it is no such model."""
    layout = _LAYOUTS.get(str(config.get("model_type")))
    return None if layout is None else VisionNames(layout)
