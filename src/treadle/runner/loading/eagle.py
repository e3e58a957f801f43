"""Loader of an EAGLE-3 head from a folder of its own, for a model that is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ModelError
from ..base import Progress
from ..kv.backend import Unsupported
from ..mlxlm import DraftHead, EagleShape, NoHead, eagle_shape, finish_eagle, tap_layers
from .config_oddities import read_config
from .draft import DraftModel
from .headed import HeadedModel, HeadKind, reason_against, with_head
from .hidden_states import hidden_size
from .model import LoadedModel
from .weights import for_device, read_weights

EAGLE = HeadKind("eagle3", "EAGLE-3 head", "its weights")


def load_eagle(
    target: LoadedModel, wanted: DraftModel, options: Mapping[str, Any], progress: Progress = lambda stage: None
) -> HeadedModel:
    """Load the EAGLE-3 head `wanted` for `target`, which was loaded with `options`, divide the memory for caches, and
    let passes of the target keep the hidden states that the head reads. Details of the target describe it. Raises
    ModelError where it can't draft for this model, and ConfigError where memory for both is missing."""
    progress("reading the EAGLE-3 head")
    config, name = read_config(wanted.folder), wanted.name or wanted.folder.name
    try:
        if reason := reason_against(target):
            raise NoHead(f"{target.name} can't use heads: {reason}")
        shape = eagle_shape(config, len(target.module.layers))
        _check(target, shape)
        headed = with_head(EAGLE, target, wanted.folder, options, lambda: _read(target, wanted.folder, config, shape))
    except NoHead as error:
        raise ModelError(
            f"`draft` {name} is an EAGLE-3 head, and can't draft for {target.name}: {error}; give a head that "
            "was trained for this model, or leave it out",
            param="draft",
        ) from error
    layers = ", ".join(map(str, shape.layers))
    headed.target.details["draft model"] = (
        f"{name} (EAGLE-3 head; {headed.about}; reads the model's states in front of layers {layers})"
    )
    return replace(headed, head=replace(headed.head, name=name))


def _check(target: LoadedModel, shape: EagleShape) -> None:
    """Tap the layers that a head of this `shape` reads. Raises NoHead where it does not fit the model, or passes give
    no such states."""
    if shape.vocabulary != target.vocabulary:
        raise NoHead(f"it was made for {shape.vocabulary} tokens, and the model has {target.vocabulary}")
    selection = target.choice.config.selection
    assert selection is not None, "hidden states of the model are known"
    selection.layers = ()
    size = hidden_size(target.library, target.module, selection)
    if shape.states != size:
        raise NoHead(f"it was made for hidden states of {shape.states} numbers, and the model's have {size}")
    tap_layers(target.module, selection, shape.layers)
    try:
        found = hidden_size(target.library, target.module, selection)
    except Unsupported as error:
        selection.layers = ()
        raise NoHead(f"the model's passes give no states in front of layers: {error}") from error
    if found != size * (len(shape.layers) + 1):
        selection.layers = ()
        raise NoHead(f"the model's states in front of layers are not {size} numbers wide")


def _read(target: LoadedModel, folder: Path, config: Mapping[str, Any], shape: EagleShape) -> tuple[DraftHead, int]:
    """Return the head in `folder`, in memory, in the model's type of numbers, and the bytes of its weights."""
    library = target.library
    module, ids = library.load_eagle(folder, config, shape)
    module = for_device(module, library, library.parameters(module), target.device)
    if isinstance(dtype := getattr(mx, target.dtype, None), mx.Dtype):
        module.set_dtype(dtype)
    nbytes = read_weights(module, folder, target.device)
    mx.eval([] if ids is None else ids)
    return finish_eagle(module, target.module, ids), nbytes
