"""The images of a running sequence: where their features go, and what stands for them in the prefix index."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from ...core.image import Image
from ..forward.segments import Features, RowSegment
from ..forward.token_view import TokenView
from ..mlxvlm import Encoded
from .features import FeatureStore
from .model import Vision
from .positions import Numbers, axes_positions, last_visible

Keys = tuple[int, int, tuple[int, ...]]


class RowImages:
    """The `images` of a `prompt`. `left` are those whose tokens are not all computed, in order. `positions` (n, 3) are
    those of the prompt's tokens, where the model has three axes. `keys` are the first and last place of each image, and
    what stands for its tokens where prompts are compared."""

    def __init__(self, vision: Vision, prompt: Sequence[int], images: Sequence[Image]) -> None:
        tokens = np.array(prompt, np.int64)
        self.images = images
        self.left = list(images)
        self.keys: list[Keys] = [(image.start, image.end, image.keys) for image in images]
        self._pads = vision.pads
        self._places = [_places(tokens, image, vision.image_token) for image in images]
        self.positions = axes_positions(len(prompt), images, vision.merge) if vision.merge else None
        self._last = last_visible(len(prompt), self._places) if vision.capabilities.whole else None

    def lacks(self, start: int, end: int, store: FeatureStore) -> bool:
        """Whether features are missing of an image with tokens from `start` to `end`."""
        return any(image.hash not in store for image in self.left if image.start < end and image.end > start)

    def columns(self, segment: RowSegment, store: FeatureStore) -> RowSegment:
        """The segment with features and what its tokens see. Raises ValueError where features are not as
        many as their places."""
        start, end = segment.start, segment.end
        if start >= self.images[-1].end:
            return segment
        columns: dict[str, Any] = {}
        if self._last is not None:
            columns["last_visible"] = _continued(self._last[start:end], start, end)
        if (features := self._features(start, end, store)) is not None:
            columns["features"] = features
            if self._pads:
                columns["tokens"] = _padded(segment.tokens, features.places)
        return replace(segment, **columns)

    def passed(self, end: int) -> Iterator[bytes]:
        """Yield the hashes of images whose tokens are computed by now, each once."""
        while self.left and self.left[0].end <= end:
            yield self.left.pop(0).hash

    def _features(self, start: int, end: int, store: FeatureStore) -> Features | None:
        parts = []
        for image, places in zip(self.images, self._places, strict=True):
            if image.start >= end or image.end <= start:
                continue
            encoded = store.get(image.hash)
            assert encoded is not None, "features are asked for before a chunk needs them"
            if len(places) != encoded.rows.shape[0]:
                counts = f"{len(places)} tokens stand for an image of {encoded.rows.shape[0]} features"
                raise ValueError(f"{counts}: its preprocessing does not fit the model")
            low, high = np.searchsorted(places, [start, end]).tolist()
            if low < high:  # else the chunk has marks between views or rows alone
                parts.append((places[low:high] - start, _rows(encoded, low, high)))
        if not parts:
            return None
        rows = [of_image for _, of_image in parts]
        levels = [mx.concatenate(list(level)) if len(level) > 1 else level[0] for level in zip(*rows, strict=True)]
        return Features(np.concatenate([at for at, _ in parts]).astype(np.int32), levels[0], levels[1:])


def _rows(encoded: Encoded, low: int, high: int) -> list[mx.array]:
    return [array[low:high] for array in (encoded.rows, *encoded.deepstack)]


def _places(tokens: np.ndarray, image: Image, token: int) -> Numbers:
    """The places of an image's placeholders in the prompt."""
    return (image.start + np.flatnonzero(tokens[image.start : image.end] == token)).astype(np.int32)


def _continued(known: Numbers, start: int, end: int) -> Numbers:
    """`known` values from `start` on, and those of text up to `end`."""
    return np.concatenate([known, np.arange(start + len(known), end, dtype=np.int32)])


def _padded(tokens: Sequence[int], places: Numbers) -> list[int]:
    padded = list(tokens)
    for place in places.tolist():
        padded[place] = 0
    return padded


class KeyedTokens(TokenView):
    """View of `tokens` with the `keys` of images (`RowImages.keys`) in place of theirs; more tokens may be appended
    meanwhile."""

    __slots__ = ("_spans", "_tokens")

    def __init__(self, tokens: Sequence[int], keys: Sequence[Keys]) -> None:
        self._tokens = tokens
        self._spans = keys

    def __len__(self) -> int:
        return len(self._tokens)

    def part(self, start: int, stop: int) -> list[int]:
        found = list(self._tokens[start:stop])
        for place in range(bisect_right(self._spans, start, key=itemgetter(1)), len(self._spans)):
            first, end, keys = self._spans[place]
            if first >= stop:
                break
            low, high = max(first, start), min(end, stop)
            found[low - start : high - start] = keys[low - first : high - first]
        return found
