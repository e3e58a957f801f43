"""Images of a prompt: which tokens stand for them, and where their pixels are."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image of a prompt, whose `count` tokens from `start` on stand for it: placeholders, and those between them.

    The preprocessed pixels are an array of `shape` and `dtype`, in C order, at the beginning of the shared memory named
    `shm`, which outlives the sequence. `grid` has an entry for each view of the image, in the order of the array: its
    size as the model's family counts it (frames, rows and columns of patches for Qwen-VL, rows and columns of patches
    or pixels for others, nothing where all images are of one size). `hash` is of the picture and of all that changes
    its preprocessing: images with equal ones are the same.
    """

    start: int
    count: int
    hash: bytes
    shm: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    grid: tuple[tuple[int, ...], ...] = ()

    @property
    def end(self) -> int:
        """The place of the first token behind it."""
        return self.start + self.count


def misplaced(images: Iterable[Image], tokens: int) -> Image | None:
    """Return the first of `images` that is not behind the one before it, with a token or more, in a prompt of `tokens`
    tokens; None where all are."""
    behind = 0
    for image in images:
        if not (behind <= image.start < image.end <= tokens and image.hash):
            return image
        behind = image.end
    return None
