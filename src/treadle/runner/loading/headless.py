"""Weights of decoders without their output head, as embedding models are saved."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

_EMBEDDINGS = "embed_tokens.weight"


def is_headless(folder: Path) -> bool:
    """Whether the weights in `folder` are those of a decoder by itself: named without its prefix, and without a head.
    Headers alone are read; whatever is wrong with the files is left to be found by mlx-lm."""
    try:
        return any(_EMBEDDINGS in mx.load(str(path)) for path in sorted(folder.glob("model*.safetensors")))
    except (RuntimeError, ValueError, OSError):
        return False
