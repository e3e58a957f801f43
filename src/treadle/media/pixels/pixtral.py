"""Pixels of Pixtral and Mistral 3: the image's own shape, in whole tokens."""

from __future__ import annotations

from PIL import Image

from ...text.images import Layout
from ...text.images.base import LOW_SIDE
from ...text.images.pixtral import PixtralImages
from .plan import Plan
from .values import Levels, channels, resized


def plan(settings: PixtralImages, width: int, height: int, low: bool) -> Plan:
    """Return the plan of an image."""
    most = LOW_SIDE if low else max(settings.height, settings.width)
    ratio = max(height / min(settings.height, most), width / min(settings.width, most))
    if ratio > 1:
        height, width = max(1, int(height / ratio)), max(1, int(width / ratio))
    rows, columns = (-(-side // settings.step) * settings.step for side in (height, width))
    return Plan((1, 3, rows, columns), Layout(((rows, columns),)))


def write(settings: PixtralImages, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the image to `out`."""
    _, _, height, width = plan.shape
    out[0] = channels(resized(image, width, height, settings.resample))
