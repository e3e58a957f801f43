"""Weights of decoders without their output head, as embedding models are saved."""

from __future__ import annotations

import json
from pathlib import Path

from ...weight_names import INDEX
from ..vision_names import EMBEDDINGS, HEAD, VisionNames, names_of
from ..weight_files import stored_tensors
from .config_oddities import read_config

_EMBEDDINGS = "embed_tokens.weight"


def is_headless(folder: Path) -> bool:
    """Whether the weights in `folder` are those of a decoder by itself, named without its prefix and without a head, or
    of a vision model without the head that its configuration asks for. Headers alone are read; whatever is wrong with
    the files is left to be found by mlx-lm."""
    names, config = tensor_names(folder), read_config(folder)
    vision = names_of(config)
    if _EMBEDDINGS in names or vision is None or vision.is_tied(config):
        return _EMBEDDINGS in names
    return _lacks_head(folder, names, vision)


def tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in the folder's files; none where one of them can't be read."""
    try:
        return list(stored_tensors(folder))
    except (RuntimeError, ValueError, OSError):
        return []


def _lacks_head(folder: Path, names: list[str], vision: VisionNames) -> bool:
    """Whether a vision model has no head, also not in a file that was not downloaded."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = [*names, *index["weight_map"]]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    known = [vision.known(name) or "" for name in names]
    return EMBEDDINGS in known and not any(name.startswith(HEAD) for name in known)
