"""Pixels of Qwen-VL: patches in the order in which the tower merges them."""

from __future__ import annotations

import math

from PIL import Image

from ...text.images import Layout
from ...text.images.base import LOW_SIDE
from ...text.images.qwen import QwenImages
from .plan import Plan, odd_shape
from .values import Levels, channels, resized

MAX_RATIO = 200


def plan(settings: QwenImages, width: int, height: int, low: bool) -> Plan:
    """Return the plan of an image. Raises InvalidRequest for one that is 200 times as long as wide."""
    rows, columns = (side // settings.patch for side in _size(settings, width, height, low))
    return Plan((rows * columns, 3 * settings.patch**2), Layout(((1, rows, columns),)))


def write(settings: QwenImages, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the patches of `image` to `out`."""
    _, rows, columns = plan.layout.grid[0]
    patch, merge = settings.patch, settings.merge
    frame = channels(resized(image, columns * patch, rows * patch, 3))
    blocks = frame.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    places = out.reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
    places[...] = blocks.transpose(1, 4, 2, 5, 0, 3, 6)


def _size(settings: QwenImages, width: int, height: int, low: bool) -> tuple[int, int]:
    """Return the height and width of the resized image: multiples of a token's side, as near as can be."""
    if max(width, height) > MAX_RATIO * min(width, height):
        raise odd_shape(width, height)
    step = settings.patch * settings.merge
    most = min(settings.max_pixels, LOW_SIDE**2) if low else settings.max_pixels
    rows, columns = (round(side / step) * step for side in (height, width))
    if rows * columns > most:
        factor = math.sqrt(height * width / most)
        rows, columns = (max(step, math.floor(side / factor / step) * step) for side in (height, width))
    elif rows * columns < settings.min_pixels:
        factor = math.sqrt(settings.min_pixels / (height * width))
        rows, columns = (math.ceil(side * factor / step) * step for side in (height, width))
    if not rows * columns:
        raise odd_shape(width, height)
    return rows, columns
