"""Families of vision models: how mlx-vlm's tower of each is called, and what its features are to the language model.

A walk calls mlx-vlm's own modules, one layer after the other. It computes nothing, as MLX does so when it is asked to,
and reads nothing from the device, which would wait for the step in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import qwen
from .encoded import Grid, Walk
from .pictures import Picture, of_one_size, of_padded_patches, of_patches, of_pixels, of_pools
from .walks import clip, flat, gemma4, idefics3, lfm2, pixtral, siglip


@dataclass(frozen=True)
class VisionFamily:
    """A family, by mlx-vlm's `module`.

    `parts` are the attributes of mlx-vlm's model that encode images, and `blocks` is where the first of them keeps its
    layers. `walk` maps the model, pixels and the grid of an image (`core.image.Image`) to features. `axes`: positions
    of images have three axes. `whole`: tokens of an image see each other, for a configuration. `scaled`: the language
    model multiplies embeddings by the root of their size, and features are not to be. `pads`: parts of the language
    model that read token ids read 0 for placeholders. `picture` gives a usual image, for a configuration of mlx-vlm's
    and a side in pixels.
    """

    module: str
    parts: tuple[str, ...]
    blocks: str
    walk: Callable[[Any, Any, Grid], Walk]
    axes: bool = False
    whole: Callable[[Mapping[str, Any]], bool] = lambda config: False
    scaled: bool = False
    pads: bool = False
    casts: bool = False
    picture: Callable[[Any, int], Picture] = of_one_size


def family_of(config: Mapping[str, Any]) -> VisionFamily | None:
    """Return the family of a model by its configuration; None where it is for text alone, or not known."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return None
    kind = config.get("model_type")
    if kind == "llava" and vision.get("model_type") == "pixtral":
        kind = "pixtral"
    return _FAMILIES.get(str(kind))


def _gemma3(model: Any, pixels: Any, grid: Grid) -> Walk:
    last = yield from siglip(model.vision_tower.vision_model, pixels)
    return flat(model.multi_modal_projector(last))


def _mistral3(model: Any, pixels: Any, grid: Grid) -> Walk:
    selected = yield from _pixtral_selected(model, pixels)
    return flat(model.multi_modal_projector(selected[0], grid))


def _pixtral(model: Any, pixels: Any, grid: Grid) -> Walk:
    selected = yield from _pixtral_selected(model, pixels)
    return flat(model.multi_modal_projector(selected))


def _pixtral_selected(model: Any, pixels: Any) -> Walk:
    places = _selected_places(model, model.vision_tower.vision_model.transformer.layers)
    return _selected(model, (yield from pixtral(model, pixels, places)))


def _llava(model: Any, pixels: Any, grid: Grid) -> Walk:
    tower = model.vision_tower.vision_model
    states = yield from clip(tower, pixels, _selected_places(model, tower.encoder.layers))
    return flat(model.multi_modal_projector(_selected(model, states)))


def _selected(model: Any, states: Sequence[Any]) -> Any:
    """The hidden states (1, patches, D) of the layer, or side by side of the layers, that the projector reads; without
    the class token where the model's strategy says so. Raises ValueError for another strategy."""
    strategy = getattr(model, "vision_feature_select_strategy", None) or "full"
    if strategy not in ("default", "full"):
        raise ValueError(f"vision_feature_select_strategy is {strategy!r}, and must be 'default' or 'full'")
    chosen = [states[layer][:, int(strategy == "default") :] for layer in _selected_layers(model)]
    return chosen[0] if len(chosen) == 1 else mx.concatenate(chosen, axis=-1)


def _selected_places(model: Any, layers: Sequence[Any]) -> Collection[int]:
    """The places of the selected states among those in front of `layers` and behind each."""
    return {range(len(layers) + 1)[layer] for layer in _selected_layers(model)}


def _selected_layers(model: Any) -> Sequence[int]:
    layers: int | Sequence[int] = model.vision_feature_layer
    return [layers] if isinstance(layers, int) else layers


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("text_config")
    return found if isinstance(found, Mapping) else {}


_PROJECTED = ("vision_tower", "multi_modal_projector")


def _qwen(module: str) -> VisionFamily:
    return VisionFamily(module, ("vision_tower",), "blocks", qwen.walk, axes=True, casts=True, picture=of_patches)


_PIXTRAL_BLOCKS = "vision_model.transformer.layers"
_SIGLIP_BLOCKS = "vision_model.encoder.layers"
_FAMILIES = {
    "qwen2_vl": _qwen("qwen2_vl"),
    "qwen2_5_vl": _qwen("qwen2_5_vl"),
    "qwen3_vl": _qwen("qwen3_vl"),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe"),
    "qwen3_5": _qwen("qwen3_5"),
    "qwen3_5_moe": _qwen("qwen3_5_moe"),
    "gemma3": VisionFamily(
        "gemma3", _PROJECTED, _SIGLIP_BLOCKS, _gemma3, whole=lambda config: True, scaled=True, casts=True
    ),
    "gemma4": VisionFamily(
        "gemma4",
        ("vision_tower", "embed_vision"),
        "encoder.layers",
        gemma4,
        whole=lambda config: _text(config).get("use_bidirectional_attention") == "vision",
        scaled=True,
        pads=True,
        picture=of_pools,
    ),
    "mistral3": VisionFamily("mistral3", _PROJECTED, _PIXTRAL_BLOCKS, _mistral3, picture=of_pixels),
    "pixtral": VisionFamily("pixtral", _PROJECTED, _PIXTRAL_BLOCKS, _pixtral, picture=of_pixels),
    "llava": VisionFamily("llava", _PROJECTED, _SIGLIP_BLOCKS, _llava, casts=True),
    "smolvlm": VisionFamily("smolvlm", ("vision_model", "connector"), "encoder.layers", idefics3),
    "idefics3": VisionFamily("idefics3", ("vision_model", "connector"), "encoder.layers", idefics3),
    "lfm2_vl": VisionFamily("lfm2_vl", _PROJECTED, "encoder.layers", lfm2, picture=of_padded_patches),
    "lfm2-vl": VisionFamily("lfm2_vl", _PROJECTED, "encoder.layers", lfm2, picture=of_padded_patches),
}
