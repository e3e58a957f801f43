"""Images of a prompt: which tokens stand for them, where their pixels are, and what their encoding costs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec

_WORDS = struct.Struct("<4Q")
_MOST = (1 << 62) - 1


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image of a prompt, whose `count` tokens from `start` on stand for it: placeholders, and those between them.

    The preprocessed pixels are an array of `shape` and `dtype`, in C order, at the beginning of the shared memory named
    `shm`, which outlives the sequence. Where they are uint8 they are levels of colours, and behind them is a table
    (3, 256), float32, of the values that the levels of each channel stand for. `grid` has an entry for each view of the
    image, in the order of the array: its size as the model's family counts it (frames, rows and columns of patches for
    Qwen-VL, rows and columns of patches or pixels for others, nothing where all images are of one size). `hash` is of
    the picture and of all that changes its preprocessing: images with equal ones are the same.
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

    @property
    def keys(self) -> tuple[int, ...]:
        """The numbers that stand for its tokens where prompts are compared: negative, and of its hash and the place.
        Four of them hold 248 bits of the hash."""
        keys = [0] * self.count
        for i, word in enumerate(_WORDS.unpack(self.hash[:32].ljust(32, b"\0"))):
            first = -2 - (word & _MOST)
            keys[i::4] = range(first, first - len(range(i, self.count, 4)), -1)
        return tuple(keys)


class VisionCapabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """Vision tower of a runner, 0 layers where there is none.

    Images are encoded in up to `layers` pieces, one for each layer and one for what comes behind them. The work of one
    grows with its patches of `patch` by `patch` pixels; at `quadratic` patches attention among them costs as much as
    the rest. With `whole` the tokens of an image see each other, so that one chunk computes them all.

    Measured in the warm-up (0: not measured): a layer of any image takes as long as `least` units of a large one, as
    the host's part does not shrink with the image; and a unit takes `unit_s` seconds.
    """

    layers: int = 0
    patch: int = 1
    quadratic: int = 1
    whole: bool = False
    least: int = 0
    unit_s: float = 0.0

    def units(self, image: Image) -> int:
        """Return the work of a layer for `image`, in tokens' worth: its patches, more of them the further the attention
        among those of a view outweighs the rest, as a part of all layers; at least what any image takes."""
        views, patches = self._patches(image.shape)
        return max(1, self.least, round(views * patches * (1 + patches / self.quadratic) / self.layers))

    def _patches(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the views of an image, and the patches of each."""
        match shape:
            case (views, _, height, width):
                return views, height * width // self.patch**2
            case (views, patches, _):
                return views, patches
        return 1, shape[0]


def fault_of_images(images: Iterable[Image], tokens: int, most: int = 0) -> str:
    """Return why a prompt of `tokens` tokens can't have `images`; empty where it can. With `most` an image is computed
    by one chunk, of so many tokens at most."""
    behind = 0
    for image in images:
        if not (behind <= image.start < image.end <= tokens and image.hash):
            return "an image does not stand for tokens of the prompt, in its order"
        if not image.shape or min(image.shape) < 1:
            return "an image has no pixels"
        behind = image.end
        if most and image.count > most:
            return f"an image has {image.count} tokens, and a step computes {most}: raise the server's --prefill-tokens"
        if most and image.end == tokens:
            return "an image is the end of the prompt: text has to follow it"
    return ""


def unsplit(images: Sequence[Image], start: int, count: int, most: int) -> int:
    """Return how many of `count` tokens from `start` on a chunk computes so that it splits no image: fewer, or up to
    `most` where it begins with one."""
    end = start + count
    for image in images:
        if image.start < end < image.end:
            if start < image.start:
                return image.start - start
            return image.end - start if image.end - start <= most else 0
    return count


def keyed(prompt: tuple[int, ...], images: Sequence[Image]) -> tuple[int, ...]:
    """Return the tokens of `prompt` with the keys of its `images` in place of theirs: where two of them agree, so do
    the images."""
    if not images:
        return prompt
    keys, behind = list[int](), 0
    for image in images:
        keys += prompt[behind : image.start]
        keys += image.keys
        behind = image.end
    return (*keys, *prompt[behind:])
