"""Plans and pixels of every family, by the type of its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

from ...text.images.base import ImageSettings
from ...text.images.gemma import Gemma3Images, Gemma4Images
from ...text.images.idefics import IdeficsImages
from ...text.images.lfm2 import Lfm2Images
from ...text.images.llava import LlavaImages
from ...text.images.pixtral import PixtralImages
from ...text.images.qwen import QwenImages
from . import gemma, idefics, lfm2, llava, pixtral, qwen
from .plan import Plan
from .values import Floats, Levels, table_of

_FAMILIES: Mapping[type[ImageSettings], tuple[Callable[..., Plan], Callable[..., None], bool]] = {
    QwenImages: (qwen.plan, qwen.write, False),
    Gemma3Images: (gemma.plan3, gemma.write3, True),
    Gemma4Images: (gemma.plan4, gemma.write4, False),
    PixtralImages: (pixtral.plan, pixtral.write, False),
    LlavaImages: (llava.plan, llava.write, True),
    IdeficsImages: (idefics.plan, idefics.write, True),
    Lfm2Images: (lfm2.plan, lfm2.write, False),
}
"""The plan of an image, what writes its levels, and whether their values are scaled in float64."""


def plan_of(settings: Any, width: int, height: int, *, low: bool = False) -> Plan:
    """Return the plan of an image of this size; `low`: few tokens are enough. Raises InvalidRequest for a shape that
    the model can't read."""
    return _FAMILIES[type(settings)][0](settings, width, height, low)


def write_pixels(settings: Any, plan: Plan, image: Image.Image, out: Levels) -> None:
    """Write the levels of an RGB image to `out`, an array of the plan's shape."""
    _FAMILIES[type(settings)][1](settings, plan, image, out)


def values_of(settings: Any) -> Floats:
    """Return the value of each level of each channel, (3, 256)."""
    return table_of(settings, _FAMILIES[type(settings)][2])
