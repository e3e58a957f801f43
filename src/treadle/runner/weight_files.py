"""Tensors in a model's folder, by their names in its files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..weight_names import MODEL, indexed, merged, weight_files

_log = logging.getLogger(__name__)
_Files = list[tuple[Path, dict[str, Any]]]


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of the folder's weight files, not read yet. Raises what MLX raises where a file is broken."""
    return _merged(folder, _loaded(folder))[0]


def tensors_to_load(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the same, and whether mlx-lm would read others, with a warning about files that are left out."""
    files = _loaded(folder)
    found, left_out = _merged(folder, files)
    if left_out:
        names = ", ".join(path.name for path in left_out)
        _log.warning(
            "%s: %s is not read, as other files hold the same tensors: remove what is not needed", folder, names
        )
    again = sum(len(tensors) for _, tensors in files) > len(found)
    return found, again or any(not path.match(MODEL) for path, _ in files)


def _loaded(folder: Path) -> _Files:
    return [(path, mx.load(str(path))) for path in weight_files(folder)]  # type: ignore[misc]


def _merged(folder: Path, files: _Files) -> tuple[dict[str, Any], list[Path]]:
    return merged(files, indexed(folder))
