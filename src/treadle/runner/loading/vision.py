"""Loader of a vision tower beside its language model, in the same memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...core.image import VisionCapabilities
from ...errors import ModelError, one_line
from ...units import size
from ..base import Progress
from ..mlxlm import embedding_of, with_older_fields
from ..mlxvlm import NoTower, Picture, Tower, VisionFamily, connect, family_of, load_parts
from ..vision.model import Vision
from .config_oddities import read_config
from .load_errors import check_tensors, model_errors
from .model import LoadedModel
from .weights import for_device, read_weights

_log = logging.getLogger(__name__)

MOST_FEATURES = 1 << 30
_TOKENS = ("image_token_id", "image_token_index")
_PART = 16
"""One part in this many of the memory for caches is for features, and one for a pass of the tower."""
_SIDES = (1024, 512)
"""Sides in pixels of the images that a tower is warmed up with, largest first."""
_FEW_PATCHES = 64
_HALF_SPEED = 3
"""Patches at which attention takes as long as the rest, by the size of hidden states: at half the speed of products."""


def with_vision(
    model: LoadedModel, folder: Path, *, asked: bool, progress: Progress = lambda stage: None
) -> LoadedModel:
    """`model` with the vision tower of its folder, where it has one that can be used. Else `no_images` says why not,
    and the model serves text. The tower's weights take their part of the memory for caches, unless that was `asked`
    for; features of images do always."""
    config = with_older_fields(read_config(folder))
    family = family_of(config)
    if family is None:
        return model
    progress("reading the vision tower")
    try:
        vision, nbytes = _load(model, family, folder, config)
        budget = _left(model.kv_budget_bytes, 0 if asked else nbytes)
    except ModelError as error:
        _log.warning("%s takes no images: %s", model.name, error)
        return replace(model, no_images=str(error))
    model.details["vision"] = f"{family.module}, {vision.tower.layers} layers, {size(nbytes)}"
    if not budget:
        return replace(model, vision=vision)
    choice = model.choice.with_memory(budget - min(MOST_FEATURES, budget // _PART) - (0 if asked else budget // _PART))
    return replace(model, choice=choice, vision=replace(vision, budget=min(MOST_FEATURES, budget // _PART)))


def _left(budget: int, weights: int) -> int:
    if budget and weights >= budget:
        raise NoTower(f"its vision tower takes {size(weights)}, and {size(budget)} are there for it and for caches")
    return budget - weights if budget else 0


def _load(model: LoadedModel, family: VisionFamily, folder: Path, config: dict[str, Any]) -> tuple[Vision, int]:
    """The tower, and the bytes of its weights. Raises NoTower."""
    library = connect(family)
    token = next((config[name] for name in _TOKENS if isinstance(config.get(name), int)), None)
    if token is None:
        raise NoTower("its config.json names no image token (image_token_id)")
    with model_errors(folder):
        parts = load_parts(library, folder, config)
        check_tensors(parts, folder)
        parameters = sum(int(array.size) for _, array in tree_flatten(parts.parameters()))
        parts = for_device(parts, model.library, parameters, model.device)
        nbytes = read_weights(parts, folder, model.device)
    dtype = getattr(mx, model.dtype)
    tower = Tower(parts, family, dtype, _factor(family, config, dtype))
    _check_features(tower, family, parts.config, model)
    vision = parts.config.vision_config
    capabilities = VisionCapabilities(
        layers=tower.pieces,
        patch=int(vision.patch_size),
        quadratic=_HALF_SPEED * int(getattr(vision, "embed_dim", vision.hidden_size)),
        whole=family.whole(config),
    )
    merge = int(vision.spatial_merge_size) if family.axes else 0
    usual, timed = (some(family, parts.config, model.device) for some in (_usual, _timed))
    return Vision(tower, token, capabilities, MOST_FEATURES // 4, merge, family.pads, usual, timed), nbytes


def _check_features(tower: Tower, family: VisionFamily, config: Any, model: LoadedModel) -> None:
    """Raise NoTower where the tower can't encode an image, or the language model has no place for its features."""
    try:
        made = tower.blank(*family.picture(config, 0))
    except Exception as error:
        raise NoTower(f"the tower that its config.json makes can't encode an image: {one_line(error)}") from error
    embedding, layers = embedding_of(model.module), len(model.module.layers)
    wide = made.rows.shape[-1]
    width = wide if embedding is None else embedding(mx.array([[0]])).shape[-1]
    if wide != width:
        raise NoTower(f"features of its vision tower have {wide} numbers, and embeddings of its language model {width}")
    if len(made.deepstack) >= layers:
        raise NoTower(
            f"its vision tower adds to what {len(made.deepstack)} layers return (deepstack_visual_indexes), and the "
            f"language model has {layers}: at least one more is needed"
        )


def _usual(family: VisionFamily, config: Any, device: str) -> tuple[Picture, ...]:
    """Images to warm up with. On a CPU a small one, or none: the tower itself takes seconds for others, where its
    operations are compiled in less."""
    return _pictures(family, config, device, _SIDES if device != "cpu" else (0,))


def _timed(family: VisionFamily, config: Any, device: str) -> tuple[Picture, ...]:
    """A large image and the smallest one, to time. On a CPU the large one is smaller, or there is none."""
    large = _SIDES[0] if device != "cpu" else isqrt(_FEW_PATCHES) * int(config.vision_config.patch_size)
    return _pictures(family, config, device, (large, 0))


def _pictures(family: VisionFamily, config: Any, device: str, sides: Sequence[int]) -> tuple[Picture, ...]:
    """Images of these sides, each once; on a CPU those of few patches."""
    made, patch = dict.fromkeys(family.picture(config, side) for side in sides), config.vision_config.patch_size
    return tuple(one for one in made if device != "cpu" or one.patches(patch) <= _FEW_PATCHES)


def _factor(family: VisionFamily, config: Mapping[str, Any], dtype: Any) -> float:
    """By what the language model multiplies embeddings."""
    if not family.scaled:
        return 1.0
    rounded = mx.bfloat16 if family.module == "gemma3" else dtype
    return float(mx.array(config["text_config"]["hidden_size"] ** 0.5, rounded))
