"""Weights of vision towers: read from a model's folder, named as mlx-vlm does, and held against its modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..vision_names import names_of
from ..weight_files import stored_tensors
from .library import MlxVlm, NoTower


def load_parts(library: MlxVlm, folder: Path, config: dict[str, Any]) -> Any:
    """mlx-vlm's model with the parts that encode images, not evaluated yet, and no language model. Raises NoTower where
    tensors are missing or of other shapes."""
    family = library.family
    stored = _read(folder, config, family.parts)
    if not stored:
        raise _without(family.parts[0])
    _check_layers(config["vision_config"], len(stored))
    _check_numbers(config["vision_config"])
    model = library.new_model(config)
    for name, child in model.children().items():
        if name not in family.parts and tree_flatten(child.parameters()):
            delattr(model, name)
    weights = _sanitized(model, stored, family.parts)
    _quantize(model, weights, config)
    for name in family.parts:
        part = getattr(model, name)
        own = {path.removeprefix(f"{name}."): array for path, array in weights.items() if path.startswith(f"{name}.")}
        wanted = dict(tree_flatten(part.parameters()))
        _check(name, wanted, own)
        part.load_weights([(path, own[path]) for path in wanted])
        part.eval()
    return model


def _check_layers(vision: Mapping[str, Any], tensors: int) -> None:
    """Raise NoTower for more layers than tensors: a million of them take minutes and gigabytes to make."""
    for name in ("depth", "num_hidden_layers"):
        layers = vision.get(name)
        if isinstance(layers, (int, float)) and layers > tensors:
            raise NoTower(f"its vision_config is broken: {name} is {layers}, and its tower has {tensors} tensors")


def _check_numbers(vision: Mapping[str, Any]) -> None:
    """Raise NoTower for numbers with which all features would be NaN, or noise."""
    rotation = vision.get("rope_parameters")
    given = {**(rotation if isinstance(rotation, Mapping) else {}), **vision}
    numbers = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    for name, value in numbers.items():
        if name == "rope_theta" and not value > 0:
            raise NoTower(f"its vision_config is broken: {name} is {value}, and must be above 0")
        if name.endswith("_eps") and not 0 <= value < 1:
            raise NoTower(f"its vision_config is broken: {name} is {value}, and must be 0 to 1")


def _read(folder: Path, config: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """The tensors of the folder that are of `parts`, by mlx-vlm's names, not read yet."""
    names = names_of(config)
    assert names is not None, "families have their names"
    found = names.rename(stored_tensors(folder))
    return {name: array for name, array in found.items() if name.startswith(tuple(f"{part}." for part in parts))}


def _sanitized(model: Any, weights: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """Weights under mlx-vlm's names, by its own rules for the model and for its tower."""
    try:
        for holder in (model, getattr(model, parts[0])):
            if hasattr(holder, "sanitize"):
                weights = holder.sanitize(weights)
    except Exception as error:
        raise NoTower(f"the weights of its vision tower are not as mlx-vlm expects them: {error}") from error
    return weights


def _quantize(model: Any, weights: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Make layers quantized whose weights are, by the configuration of the model, or of the layer."""
    stored = config.get("quantization")
    if not isinstance(stored, Mapping):
        return

    def how(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = stored.get(path)
        return dict(own) if isinstance(own, Mapping) else True

    nn.quantize(
        model,
        group_size=stored.get("group_size", 64),
        bits=stored.get("bits", 4),
        mode=stored.get("mode", "affine"),
        class_predicate=how,
    )


def _check(part: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise NoTower where tensors of a part are missing, of other shapes, or without a place in it. Those of whole
    numbers, such as ids of positions, need none."""
    missing = [name for name in wanted if name not in found]
    if len(missing) == len(wanted):
        raise _without(part)
    if missing:
        raise NoTower(f"{len(missing)} tensors of its {part} are missing, such as {part}.{missing[0]}")
    surplus = [name for name in found if name not in wanted and mx.issubdtype(found[name].dtype, mx.inexact)]
    if surplus:
        raise NoTower(
            f"its config.json has no place for {len(surplus)} tensors of its {part}, such as {part}.{surplus[0]}"
        )
    for name, array in wanted.items():
        if array.shape != found[name].shape:
            shapes = f"{tuple(found[name].shape)}, and its config.json makes it {tuple(array.shape)}"
            raise NoTower(f"{part}.{name} has shape {shapes}")


def _without(part: str) -> NoTower:
    return NoTower(
        f"its weights have no {part}: save the whole model (AutoModelForImageTextToText), not its language model"
    )
