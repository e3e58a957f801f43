"""Families of vision models by the type in config.json, and the reader of a folder's image settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from . import gemma, idefics, lfm2, llava, pixtral, qwen
from .base import ImageSettings

AnySettings = (
    qwen.QwenImages
    | gemma.Gemma3Images
    | gemma.Gemma4Images
    | pixtral.PixtralImages
    | llava.LlavaImages
    | idefics.IdeficsImages
    | lfm2.Lfm2Images
)
Fields = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], dict[str, Any]]
Object = Mapping[str, Any]

_QWEN: tuple[type[ImageSettings], Fields] = (qwen.QwenImages, qwen.fields)
FAMILIES: Mapping[str, tuple[type[ImageSettings], Fields]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": (gemma.Gemma3Images, gemma.fields3),
    "gemma4": (gemma.Gemma4Images, gemma.fields4),
    **dict.fromkeys(("pixtral", "mistral3"), (pixtral.PixtralImages, pixtral.fields)),
    "llava": (llava.LlavaImages, llava.fields),
    **dict.fromkeys(("smolvlm", "idefics3"), (idefics.IdeficsImages, idefics.fields)),
    **dict.fromkeys(("lfm2_vl", "lfm2-vl"), (lfm2.Lfm2Images, lfm2.fields)),
}
NO_TOWER = "the model reads text only"
_CURE = "download the folder's files again"


def read_image_settings(
    config: Object,
    preprocessor: Object,
    processor: Object,
    id_of: Callable[[str], int | None],
    names: Mapping[str, str] | None = None,
) -> tuple[AnySettings | None, str]:
    """Return the image settings of a folder by its config.json, preprocessor_config.json and processor_config.json, or
    None with the reason. `id_of` returns the id of a token by its text; `names` are the texts of named special tokens
    (`boi_token`, ...)."""
    kind, vision = config.get("model_type"), config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None, NO_TOWER
    if kind == "llava" and vision.get("model_type") == "pixtral":  # as converted by transformers
        kind = "pixtral"
    if not isinstance(kind, str) or kind not in FAMILIES:
        return None, f"images of models of type '{str(kind)[:64]}' are not served"
    family, fields = FAMILIES[kind]
    own = processor.get("image_processor")
    raw = {**preprocessor, **(own if isinstance(own, Mapping) else {})}
    try:
        found = fields(raw, dict(config), {**(names or {}), **processor})
        ids = {"token_id": id_of(found["token"]), "placeholder_id": id_of(found["placeholder"])}
        if None in ids.values():
            return None, f"the tokenizer has no token {found['token'][:64]!r} for images"
        settings = msgspec.convert({**found, **ids, "type": family.__name__}, type=AnySettings)
    except (msgspec.ValidationError, ValueError, TypeError, AttributeError) as error:
        return None, f"the folder's image settings can't be used: {' '.join(str(error).split())[:200]}"
    unfit = _unfit(settings, config, vision)
    return (None, unfit) if unfit else (settings, "")


def _unfit(settings: ImageSettings, config: Object, vision: Object) -> str:
    """Return how the settings contradict config.json, by which the tower was made; empty where they do not."""
    both = {**config, **vision}
    pairs = [(getattr(settings, ours), both.get(theirs), theirs) for ours, theirs in settings.of_tower.items()]
    pairs += [(settings.token_id, config.get(name), name) for name in ("image_token_id", "image_token_index")]
    wrong = [(ours, theirs, name) for ours, theirs, name in pairs if type(theirs) is int and theirs != ours]
    if not wrong:
        how = settings.contradiction(config, vision)
        return f"{how}: {_CURE}" if how else ""
    ours, theirs, name = wrong[0]
    found = f"the tokenizer's {settings.token}" if name.startswith("image_token") else "the folder's image settings"
    return f"{name} is {theirs} in config.json, and {ours} by {found}: {_CURE}"
