"""Plan of an image's preprocessing: sizes alone, from the image's own size."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InvalidRequest
from ...text.images import Layout
from ..pixels_memory import bytes_of


@dataclass(frozen=True)
class Plan:
    """The pixels are an array of `shape`. `layout` is what the prompt needs to know."""

    shape: tuple[int, ...]
    layout: Layout

    @property
    def size_bytes(self) -> int:
        return bytes_of(self.shape)


def odd_shape(width: int, height: int) -> InvalidRequest:
    """Return the refusal of an image whose shape the model can't see."""
    return InvalidRequest(f"the image has {width} x {height} pixels, a shape that this model can't read: cut it")
