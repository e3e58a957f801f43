"""Pixels of LFM2-VL: patches of one view, or of squares of the image and a small view."""

from __future__ import annotations

import math

from PIL import Image

from ...text.images import Layout
from ...text.images.lfm2 import Lfm2Images
from .plan import Plan, odd_shape
from .values import Levels, channels, resized


def plan(settings: Lfm2Images, width: int, height: int, low: bool) -> Plan:
    """Return the plan of an image. Raises InvalidRequest for one so narrow that its view has too many patches."""
    whole = tuple(side // settings.patch for side in _size(settings, width, height))
    if math.prod(whole) > settings.patches:
        raise odd_shape(width, height)
    rows, columns = _tiles(settings, width, height) if not low and _is_large(settings, width, height) else (0, 0)
    side = settings.tile // settings.patch
    grid = (*[(side, side)] * (rows * columns), whole)
    return Plan((len(grid), settings.patches, 3 * settings.patch**2), Layout(grid, (rows, columns)))


def write(settings: Lfm2Images, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the patches of each view to `out`, with zeros behind them."""
    patch, tile, (rows, columns) = settings.patch, settings.tile, plan.layout.tiles
    views = []
    if rows:
        large = resized(image, columns * tile, rows * tile, settings.resample)
        boxes = [(x * tile, y * tile, (x + 1) * tile, (y + 1) * tile) for y in range(rows) for x in range(columns)]
        views = [large.crop(box) for box in boxes]
    high, wide = plan.layout.grid[-1]
    views.append(resized(image, wide * patch, high * patch, settings.resample))
    for place, view, (high, wide) in zip(out, views, plan.layout.grid, strict=True):
        values = channels(view).reshape(3, high, patch, wide, patch)
        place[: high * wide] = values.transpose(1, 3, 2, 4, 0).reshape(high * wide, -1)
        place[high * wide :] = 0


def _size(settings: Lfm2Images, width: int, height: int) -> tuple[int, int]:
    """Return the height and width of the view of the whole image."""
    step = settings.patch * settings.merge
    least, most = settings.min_tokens * step**2, settings.max_tokens * step**2
    rows, columns = (max(step, round(side / step) * step) for side in (height, width))
    if rows * columns > most:
        factor = math.sqrt(height * width / most)
        rows, columns = (max(step, math.floor(side / factor / step) * step) for side in (height, width))
    elif rows * columns < least:
        factor = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * factor / step) * step for side in (height, width))
    return rows, columns


def _is_large(settings: Lfm2Images, width: int, height: int) -> bool:
    step = settings.patch * settings.merge
    rows, columns = (max(settings.patch, round(side / step) * step) for side in (height, width))
    return rows * columns > settings.max_tokens * step**2 * settings.tolerance


def _tiles(settings: Lfm2Images, width: int, height: int) -> tuple[int, int]:
    """Return the rows and columns of squares whose shape is nearest to the image's; of two that are equally near, the
    larger one if the image has enough pixels for it."""
    best, nearest = (1, 1), math.inf
    for rows, columns in _grids(settings.min_tiles, settings.max_tiles):
        distance = abs(width / height - columns / rows)
        enough = width * height > 0.5 * settings.tile**2 * rows * columns
        if distance < nearest or (distance == nearest and enough):
            best, nearest = (rows, columns), distance
    return best if best != (1, 1) else (0, 0)


def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return the rows and columns of all grids with `least` to `most` squares, small ones first."""
    found = [
        (wide, high)
        for count in range(least, most + 1)
        for wide in range(1, count + 1)
        for high in range(1, count + 1)
        if least <= wide * high <= most
    ]
    return [(high, wide) for wide, high in sorted(set(found), key=lambda grid: grid[0] * grid[1])]
