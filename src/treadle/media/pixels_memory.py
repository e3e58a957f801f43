"""Preprocessed pixels of one image, by the name of their shared memory."""

from __future__ import annotations

import math

import msgspec

from ..errors import Busy
from ..text.images import Layout

LEVELS = 256
TABLE_BYTES = 3 * LEVELS * 4
"""Of the float32 value of each level of each channel."""


class NoRoom(Busy):
    """Refusal of an image for whose pixels the machine has no shared memory."""


def bytes_of(shape: tuple[int, ...]) -> int:
    """Return the bytes of levels of this shape, and of the table behind them."""
    return math.prod(shape) + TABLE_BYTES


class Pixels(msgspec.Struct, frozen=True):
    """Preprocessed pixels in shared memory `name`: levels of colours, a uint8 array of `shape`, and behind it the table
    (3, 256), float32, of the values that the levels of each channel stand for."""

    name: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def size_bytes(self) -> int:
        return bytes_of(self.shape)
