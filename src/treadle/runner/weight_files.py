"""Tensors in a model's folder, by their names in its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of `model*.safetensors`, not read yet. Raises what MLX raises where a file is broken."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        found |= mx.load(str(path))  # type: ignore[arg-type]
    return found
