"""Adapter to mlx-vlm, the only package that uses it: vision towers and projectors, none of its language models.

mlx-vlm is optional (`treadle[vision]`). `connect` checks what a family needs of it; where that is missing or different,
the model serves text, and status says why it takes no images.
"""

from __future__ import annotations

from .encoded import Encoded
from .families import VisionFamily, family_of
from .levels import TABLE
from .library import MlxVlm, NoTower, connect
from .pictures import Picture
from .tower import LazyImage, Tower
from .weights import load_parts

__all__ = [
    "TABLE",
    "Encoded",
    "LazyImage",
    "MlxVlm",
    "NoTower",
    "Picture",
    "Tower",
    "VisionFamily",
    "connect",
    "family_of",
    "load_parts",
]
