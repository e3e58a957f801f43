"""Positions of a prompt with images (M-RoPE; Wang et al., "Qwen2-VL", 2024), and what its tokens see. Pure numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...core.image import Image

Numbers = npt.NDArray[np.int32]


def axes_positions(tokens: int, images: Sequence[Image], merge: int) -> Numbers:
    """Positions (tokens, 3) in time, height and width. Those of text are equal and go on behind the largest before;
    those of an image count its rows and columns of tokens, `merge` rows and columns of patches each. Raises ValueError
    where an image has others in the prompt."""
    made, at, first = np.zeros((tokens, 3), np.int32), 0, 0
    for image in images:
        _, rows, columns = image.grid[0]
        rows, columns = rows // merge, columns // merge
        if rows * columns != image.count:
            raise ValueError(f"an image of {rows} by {columns} features has {image.count} tokens in the prompt")
        made[at : image.start] = _text(first, image.start - at)
        first += image.start - at
        made[image.start : image.end, 0] = first
        made[image.start : image.end, 1] = first + np.repeat(np.arange(rows), columns)
        made[image.start : image.end, 2] = first + np.tile(np.arange(columns), rows)
        first += max(rows, columns)
        at = image.end
    made[at:] = _text(first, tokens - at)
    return made


def last_visible(tokens: int, places: Sequence[Numbers]) -> Numbers:
    """The last token (tokens,) that each one sees: the end of its run of placeholders, which are at `places` (m,) of
    each image; itself in text."""
    made = np.arange(tokens, dtype=np.int32)
    for of_image in places:
        ends = np.flatnonzero(np.diff(of_image, append=-1) != 1)
        runs = np.searchsorted(ends, np.arange(len(of_image)))
        made[of_image] = of_image[ends[runs]]
    return made


def _text(first: int, count: int) -> Numbers:
    return np.arange(first, first + count, dtype=np.int32)[:, None]
