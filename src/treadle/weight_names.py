"""Names of the files that hold a model's weights, and the choice among them where several hold the same tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

Tensor = TypeVar("Tensor")

MODEL = "model*.safetensors"
"""The files that mlx-lm reads."""
WEIGHTS = (MODEL, "mtp.safetensors")
"""The same, and the MTP heads of Qwen's and GLM's quantized folders."""
INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


def is_weights(name: str) -> bool:
    """Whether a file of this name, in a model's folder itself, holds weights of the model."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in WEIGHTS)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that may hold the model's weights, the first of which count most: those that the index names,
    and then, as in transformers, the one of the whole model."""
    indexed = [folder / name for name in sorted(_indexed(folder)) if (folder / name).is_file()]
    found = {path for pattern in WEIGHTS for path in folder.glob(pattern)} - {*indexed}
    return [*indexed, *sorted(found, key=lambda path: (path.name != _WHOLE, path.name))]


def merged(files: Iterable[tuple[Path, Mapping[str, Tensor]]]) -> tuple[dict[str, Tensor], list[Path]]:
    """Return the tensors of all files, in order, and the files that are left out: each that holds a tensor of those
    before it is another version of the model, or a rest of one."""
    found, left_out = dict[str, Tensor](), list[Path]()
    for path, tensors in files:
        if found.keys().isdisjoint(tensors):
            found |= tensors
        else:
            left_out.append(path)
    return found, left_out


def _indexed(folder: Path) -> set[str]:
    """Return the names of weight files in the folder's index; none where it has no index that can be read."""
    path = folder / INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"] if path.is_file() else {}
        names = {name for name in places.values() if isinstance(name, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {name for name in names if name.endswith(".safetensors") and not {"/", "\\", "\0"} & {*name}}
