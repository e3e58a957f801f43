"""Tensors in a model's folder, by their names in its files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..weight_names import MODEL, merged, weight_files

_log = logging.getLogger(__name__)


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of the folder's weight files, not read yet. Raises what MLX raises where a file is broken."""
    return _stored(folder)[0]


def tensors_to_load(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the same, and whether mlx-lm would read others, with a warning about files that are left out."""
    found, read, left_out = _stored(folder)
    if left_out:
        names = ", ".join(path.name for path in left_out)
        _log.warning(
            "%s: %s is not read, as other files hold the same tensors: remove what is not needed", folder, names
        )
    return found, bool(left_out) or any(not path.match(MODEL) for path in read)


def _stored(folder: Path) -> tuple[dict[str, Any], list[Path], list[Path]]:
    files = weight_files(folder)
    found, left_out = merged((path, mx.load(str(path))) for path in files)  # type: ignore[misc]
    return found, [path for path in files if path not in left_out], left_out
