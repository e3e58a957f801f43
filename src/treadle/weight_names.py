"""Names of the files that hold a model's weights, and the choice among them where several hold the same tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

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
    named = [folder / name for name in sorted({*indexed(folder).values()}) if (folder / name).is_file()]
    found = {path for pattern in WEIGHTS for path in folder.glob(pattern)} - {*named}
    return [*named, *sorted(found, key=lambda path: (path.name != _WHOLE, path.name))]


def merged(
    files: Iterable[tuple[Path, Mapping[str, Tensor]]], places: Mapping[str, str]
) -> tuple[dict[str, Tensor], list[Path]]:
    """Return the tensors of all files, in order, and the files that are left out: each that holds a tensor of those
    before it is another version of the model, or a rest of one. Files that the index names belong together: where
    several hold a tensor, the one counts that its `places` give, else the first."""
    found, left_out = dict[str, Tensor](), list[Path]()
    named = {*places.values()}
    for path, tensors in files:
        if found.keys().isdisjoint(tensors):
            found |= tensors
        elif path.name in named:
            found |= {name: own for name, own in tensors.items() if name not in found or places.get(name) == path.name}
        else:
            left_out.append(path)
    return found, left_out


def indexed(folder: Path) -> dict[str, str]:
    """Return the name of each tensor's file by the folder's index; none where it has no index that can be read."""
    path = folder / INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"] if path.is_file() else {}
        return {tensor: name for tensor, name in places.items() if _is_file_name(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and {"/", "\\", "\0"}.isdisjoint(name)
