"""Pixels of Gemma 3 and Gemma 4."""

from __future__ import annotations

import math

from PIL import Image

from ...text.images import Layout
from ...text.images.gemma import Gemma3Images, Gemma4Images
from .plan import Plan, odd_shape
from .values import Levels, channels, resized

# Gemma 3


def plan3(settings: Gemma3Images, width: int, height: int, low: bool) -> Plan:
    """Return the plan of an image."""
    tiles = _crops(settings, width, height) if settings.pan_and_scan and not low else (0, 0)
    views = 1 + tiles[0] * tiles[1]
    return Plan((views, 3, settings.height, settings.width), Layout((), tiles))


def write3(settings: Gemma3Images, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the whole image and its parts to `out`."""
    rows, columns = plan.layout.tiles
    boxes = [(0, 0, image.width, image.height)]
    if rows:
        height, width = math.ceil(image.height / rows), math.ceil(image.width / columns)
        corners = [(width * column, height * row) for row in range(rows) for column in range(columns)]
        boxes += [(x, y, min(x + width, image.width), min(y + height, image.height)) for x, y in corners]
    for place, box in zip(out, boxes, strict=True):
        part = resized(image.crop(box), settings.width, settings.height, settings.resample)
        place[...] = channels(part)


def _crops(settings: Gemma3Images, width: int, height: int) -> tuple[int, int]:
    """Return the rows and columns that a long image is cut into; (0, 0) for others."""
    long, short = max(width, height), min(width, height)
    if long / short < settings.crop_ratio:
        return 0, 0
    count = min(int(long / short + 0.5), long // settings.least_crop)
    count = min(max(2, count), settings.crops)
    if min(math.ceil(long / count), short) < settings.least_crop:
        return 0, 0
    return (1, count) if width >= height else (count, 1)


# Gemma 4


def plan4(settings: Gemma4Images, width: int, height: int, low: bool) -> Plan:
    """Return the plan of an image. Raises InvalidRequest for one that is too long and narrow."""
    rows, columns = _size(settings, width, height, settings.low_tokens if low else settings.tokens)
    return Plan((1, 3, rows, columns), Layout(((rows // settings.patch, columns // settings.patch),)))


def write4(settings: Gemma4Images, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the image to `out`."""
    _, _, height, width = plan.shape
    out[0] = channels(resized(image, width, height, 3))


def _size(settings: Gemma4Images, width: int, height: int, tokens: int) -> tuple[int, int]:
    """Return the height and width of the largest image of about this shape with at most `tokens` tokens."""
    side = settings.pool * settings.patch
    factor = math.sqrt(tokens * side**2 / (height * width))
    rows, columns = (math.floor(factor * length / side) * side for length in (height, width))
    if not rows and not columns:
        raise odd_shape(width, height)
    if not rows:
        return side, min(max(1, width // height), tokens) * side
    if not columns:
        return min(max(1, height // width), tokens) * side, side
    return rows, columns
