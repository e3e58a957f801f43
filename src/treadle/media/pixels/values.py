"""Resizing, levels of pixels, and the tower's value for each level."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...text.images.base import ImageSettings
from ..pixels_memory import LEVELS

Levels = NDArray[np.uint8]
Floats = NDArray[np.float32]


def resized(image: Image.Image, width: int, height: int, resample: int) -> Image.Image:
    """Return the image in another size."""
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling(resample))


def channels(image: Image.Image) -> Levels:
    """Return the levels of an RGB image, (3, height, width)."""
    pixels: Levels = np.asarray(image)
    return pixels.transpose(2, 0, 1)


@lru_cache(maxsize=4)
def table_of(settings: ImageSettings, exact: bool) -> Floats:
    """Return the value of each level of each channel, (3, 256). `exact`: levels are scaled in float64, as transformers
    does, or in float32, as mlx-vlm does; the values differ in their last bit."""
    levels: NDArray[Any] = np.arange(LEVELS, dtype=np.float64)
    if settings.rescales:
        levels = levels * settings.scale if exact else levels.astype(np.float32) * np.float32(settings.scale)
    table = np.repeat(levels.astype(np.float32)[None], 3, axis=0)
    if settings.normalizes:
        mean, std = (np.array(values, np.float32)[:, None] for values in (settings.mean, settings.std))
        table = (table - mean) / std
    return table.astype(np.float32)
