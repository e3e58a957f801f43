"""Preprocessed pixels of one image, by the name of their shared memory."""

from __future__ import annotations

import msgspec

from ..text.images import Layout

ITEM_BYTES = 4


def bytes_of(shape: tuple[int, ...]) -> int:
    """Return the bytes of a float32 array."""
    size = ITEM_BYTES
    for side in shape:
        size *= side
    return size


class Pixels(msgspec.Struct, frozen=True):
    """Preprocessed pixels: float32, an array of `shape` in shared memory `name`."""

    name: str
    shape: tuple[int, ...]
    layout: Layout

    @property
    def size_bytes(self) -> int:
        return bytes_of(self.shape)
