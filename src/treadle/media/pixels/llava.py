"""Pixels of LLaVA 1.5: the middle of the image in one size."""

from __future__ import annotations

import math

from PIL import Image

from ...text.images import Layout
from ...text.images.base import LARGEST_AREA
from ...text.images.llava import LlavaImages
from .plan import Plan, odd_shape
from .values import Levels, channels, resized


def plan(settings: LlavaImages, width: int, height: int, low: bool) -> Plan:
    """Return the plan of an image. Raises InvalidRequest for one so narrow that it is too large once resized."""
    if not settings.pads and math.prod(_size(settings, width, height)) > LARGEST_AREA:
        raise odd_shape(width, height)
    return Plan((1, 3, *settings.shape), Layout())


def write(settings: LlavaImages, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the middle of the image to `out`."""
    if settings.pads:
        image = _padded(image, settings)
    image = resized(image, *_size(settings, image.width, image.height), settings.resample)
    height, width = settings.shape
    out[0] = channels(_middle(image, width, height))


def _size(settings: LlavaImages, width: int, height: int) -> tuple[int, int]:
    """Return the width and height of the resized image."""
    if not settings.edge:
        return settings.width, settings.height
    long = int(settings.edge * max(width, height) / min(width, height))
    return (settings.edge, long) if width <= height else (long, settings.edge)


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    """Return the middle of the image, with black beside what it does not have."""
    if image.size == (width, height):
        return image
    fits = image.width >= width and image.height >= height
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if not fits:
        left, top = -((width - image.width + 1) // 2), -((height - image.height + 1) // 2)
    return image.crop((left, top, left + width, top + height))


def _padded(image: Image.Image, settings: LlavaImages) -> Image.Image:
    """Return the image in the middle of a square of the mean colour; made smaller before, where that would have more
    pixels than any image may have."""
    most = math.isqrt(LARGEST_AREA)
    if max(image.size) > most:
        width, height = (max(1, edge * most // max(image.size)) for edge in image.size)
        image = resized(image, width, height, settings.resample)
    side = max(image.size)
    red, green, blue = (int(level * 255) for level in settings.mean)
    square = Image.new("RGB", (side, side), (red, green, blue))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
