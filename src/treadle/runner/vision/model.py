"""A model's vision tower in memory, with all that the runner must know about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.image import VisionCapabilities
from ..mlxvlm import Picture


@dataclass(frozen=True)
class Vision:
    """`tower` makes features of images, up to `budget` bytes of which are kept.

    `image_token` is the id of placeholders. Where `merge` is not 0, positions have three axes, and an image has one row
    of positions for as many rows of patches. With `capabilities.whole` tokens of an image see each other. Where `pads`,
    placeholders are token 0 to the language model. `usual` are images to warm up with, `timed` a large one and the
    smallest, to measure what images cost: one where the family has one size.
    """

    tower: Any
    image_token: int
    capabilities: VisionCapabilities
    budget: int
    merge: int = 0
    pads: bool = False
    usual: tuple[Picture, ...] = ()
    timed: tuple[Picture, ...] = ()
