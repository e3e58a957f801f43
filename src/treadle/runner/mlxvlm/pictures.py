"""Usual images of each family: arrays of pixels as a front makes them, for the warm-up.

`config` is that of mlx-vlm's model. Images are squares of about `side` pixels a side, unless the family has one size.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple


class Picture(NamedTuple):
    """The shape of an image's pixels, and its grid (`core.image.Image`)."""

    shape: tuple[int, ...]
    grid: tuple[tuple[int, ...], ...] = ()

    def patches(self, patch: int) -> int:
        """How many patches of `patch` pixels a side the tower computes."""
        return self.shape[0] * self.shape[-1] * self.shape[-2] // patch**2 if len(self.shape) == 4 else self.shape[-2]


def of_one_size(config: Any, side: int) -> Picture:
    """A view of the size that all images have."""
    size = config.vision_config.image_size
    return Picture((1, 3, size, size))


def of_patches(config: Any, side: int) -> Picture:
    """An image of Qwen-VL."""
    vision = config.vision_config
    length = _whole(side // vision.patch_size, vision.spatial_merge_size)
    return Picture((length**2, 3 * vision.patch_size**2), ((1, length, length),))


def of_pools(config: Any, side: int) -> Picture:
    """An image of Gemma 4, which has no more tokens than fit."""
    vision = config.vision_config
    step = vision.pooling_kernel_size * vision.patch_size
    length = _whole(min(side, isqrt(vision.default_output_length) * step), step)
    return Picture((1, 3, length, length), ((length // vision.patch_size,) * 2,))


def of_pixels(config: Any, side: int) -> Picture:
    """An image of Pixtral or Mistral 3."""
    step = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    length = _whole(min(side, config.vision_config.image_size), step)
    return Picture((1, 3, length, length), ((length, length),))


def of_padded_patches(config: Any, side: int) -> Picture:
    """One view of LFM2-VL."""
    patch, most = config.vision_config.patch_size, config.max_num_patches
    length = _whole(min(side // patch, isqrt(most)), config.downsample_factor)
    return Picture((1, most, 3 * patch**2), ((length, length),))


def _whole(length: int, step: int) -> int:
    return max(1, length // step) * step
