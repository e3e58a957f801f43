"""Paths of a model in the hub's cache, in the layout of `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path

PARTIAL = ".incomplete"


def repository(cache: Path, model: str) -> Path:
    """Return the folder of `model`: blobs, refs and snapshots."""
    return cache / f"models--{model.replace('/', '--')}"


def locks_of(cache: Path, model: str) -> Path:
    """Return the folder of the lock files of `model`."""
    return cache / ".locks" / repository(cache, model).name


def blob_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
