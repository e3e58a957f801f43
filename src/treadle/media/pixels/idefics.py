"""Pixels of SmolVLM and Idefics 3: squares of the image row by row, and the whole image last."""

from __future__ import annotations

from PIL import Image

from ...text.images import Layout
from ...text.images.idefics import IdeficsImages
from .plan import Plan
from .values import Levels, channels, resized

LARGEST = 4096


def plan(settings: IdeficsImages, width: int, height: int, low: bool) -> Plan:
    """Return the plan of an image."""
    rows, columns = _tiles(settings, width, height) if settings.splits and not low else (0, 0)
    return Plan((rows * columns + 1, 3, settings.tile, settings.tile), Layout((), (rows, columns)))


def write(settings: IdeficsImages, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the squares and the whole image to `out`."""
    tile, (rows, columns) = settings.tile, plan.layout.tiles
    image = resized(image, *_longest(settings, *image.size), settings.resample)
    if rows:
        image = resized(image, columns * tile, rows * tile, settings.resample)
    boxes = [(x * tile, y * tile, (x + 1) * tile, (y + 1) * tile) for y in range(rows) for x in range(columns)]
    views = [image.crop(box) for box in boxes] + [resized(image, tile, tile, settings.resample)]
    for place, view in zip(out, views, strict=True):
        place[...] = channels(view)


def _tiles(settings: IdeficsImages, width: int, height: int) -> tuple[int, int]:
    """Return the rows and columns of squares; (0, 0) for an image that is one."""
    tile = settings.tile
    width, height = _longest(settings, width, height)
    ratio = width / height
    if width >= height:
        width = -(-width // tile) * tile
        height = -(-int(width / ratio) // tile) * tile
    else:
        height = -(-height // tile) * tile
        width = -(-int(height * ratio) // tile) * tile
    rows, columns = max(1, height // tile), max(1, width // tile)
    return (rows, columns) if rows * columns > 1 else (0, 0)


def _longest(settings: IdeficsImages, width: int, height: int) -> tuple[int, int]:
    """Return the width and height of an image whose longer side is `edge`. The shorter one is even."""
    ratio = width / height
    if width >= height:
        width, height = settings.edge, int(settings.edge / ratio)
        height += height % 2
    else:
        width, height = int(settings.edge * ratio), settings.edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > LARGEST:
        width, height = LARGEST, int(LARGEST / ratio)
    elif height > width and height > LARGEST:
        width, height = int(LARGEST * ratio), LARGEST
    return max(width, 1), max(height, 1)
