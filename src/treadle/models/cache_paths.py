"""Paths of a model in the hub's cache, in the layout of `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path

PARTIAL = ".incomplete"


def repository(cache: Path, model: str) -> Path:
    """The folder of `model`: blobs, refs and snapshots."""
    return cache / f"models--{model.replace('/', '--')}"


def locks_of(cache: Path, model: str) -> Path:
    """The folder of its lock files."""
    return cache / ".locks" / repository(cache, model).name


def blob_size(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
