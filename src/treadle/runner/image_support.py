"""Support of images by a runner: its capabilities, the reason against them, and continuations without images."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ..core.capabilities import Capabilities
from ..core.image import VisionCapabilities
from .kv.backend import KvBackend
from .loading.model import LoadedModel


def no_images(model: LoadedModel, backend: KvBackend) -> str:
    """Return why `model` can't have images in its prompts with `backend`; empty where it can, or has no tower."""
    vision = model.vision
    if vision is None:
        return model.no_images
    reasons = [backend.no_features]
    if vision.capabilities.whole:
        reasons.append(backend.no_positions)
    if vision.merge:
        reasons.append(backend.no_axes)
    return next(filter(None, reasons), "")


def with_images(
    can: Capabilities, model: LoadedModel, backend: KvBackend, vision: VisionCapabilities | None
) -> Capabilities:
    """Return `can` with images by the tower of `vision`, or with the reason why `model` takes none."""
    if (reason := no_images(model, backend)) or vision is None:
        return replace(can, no_images=reason)
    return replace(can, modalities=("text", "image"), vision=vision)


def up_to_images(tokens: Sequence[int]) -> Sequence[int]:
    """Return `tokens` up to the first key of an image."""
    return tokens[: next((i for i, token in enumerate(tokens) if token < 0), len(tokens))]
