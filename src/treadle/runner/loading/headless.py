"""Weights of decoders without their output head, as embedding models are saved."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from .config_oddities import read_config

_EMBEDDINGS = "embed_tokens.weight"
_IN_VISION_MODELS = ("language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
_HEAD = "lm_head"
_TIED = "tie_word_embeddings"


def is_headless(folder: Path) -> bool:
    """Whether the weights in `folder` are those of a decoder by itself, named without its prefix and without a head, or
    of a vision model without the head that its configuration asks for. Headers alone are read; whatever is wrong with
    the files is left to be found by mlx-lm."""
    try:
        names = list(_names(folder))
    except (RuntimeError, ValueError, OSError):
        return False
    return _EMBEDDINGS in names or (_is_untied(folder) and _lacks_head(folder, names))


def _names(folder: Path) -> Iterable[str]:
    for path in sorted(folder.glob("model*.safetensors")):
        tensors: Any = mx.load(str(path))
        yield from tensors


def _lacks_head(folder: Path, names: list[str]) -> bool:
    """Whether a vision model has no head, also not in a file that was not downloaded."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = [*names, *index["weight_map"]]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return any(name.endswith(_IN_VISION_MODELS) for name in names) and not any(_HEAD in name for name in names)


def _is_untied(folder: Path) -> bool:
    config = read_config(folder)
    text = config.get("text_config")
    return isinstance(text, dict) and not (text.get(_TIED, config.get(_TIED)))
