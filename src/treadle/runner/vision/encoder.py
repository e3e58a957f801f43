"""Encoding of images: layers of the tower that plans ask for, and features for the sequences that need them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from ...core.image import Image
from ...core.messages import Submit
from ...core.plan import Encode
from ...core.statistics import FeatureStatistics
from ...shared_memory import attach
from ..forward.segments import RowSegment
from ..mlxvlm import TABLE, LazyImage
from .features import FeatureStore
from .model import Vision
from .row_images import RowImages


class Stale(Exception):
    """Layers of an image were asked for whose beginning is not there, or features that are not kept."""


class ImageEncoder:
    """Encodes images with `vision`, each by its hash for all sequences that have it. Without one (None) it takes none,
    for the `reason`."""

    def __init__(self, vision: Vision | None, reason: str = "") -> None:
        self._vision = None if reason else vision
        self.reason = reason or "this model takes no images"
        self._begun: dict[bytes, LazyImage] = {}
        self._store = FeatureStore(0 if vision is None else vision.budget)

    def has_features(self, hash_: bytes) -> bool:
        """Whether the features of an image are kept."""
        return hash_ in self._store

    def admit(self, request: Submit, cached: int) -> RowImages | None:
        """The images of a sequence that joins with `cached` tokens computed; features of the others are kept for it.
        None where it has none. Raises ValueError where it can't have any."""
        if not request.images:
            return None
        if self._vision is None:
            raise ValueError(self.reason)
        made = RowImages(self._vision, request.prompt, request.images)
        list(made.passed(cached))
        for image in made.left:
            self._store.need(image.hash)
        return made

    def encode(self, image: Image, encode: Encode) -> list[Any]:
        """The arrays to compute for the layers of a plan. Raises Stale where those before are missing, OSError or
        ValueError where the image's pixels can't be read or do not fit the tower."""
        if encode.start == 0:
            self._begun[image.hash] = self._begin(image)
        lazy = self._begun.get(image.hash)
        if lazy is None or lazy.done != encode.start:
            raise Stale
        arrays, encoded = lazy.run(encode.count)
        if encoded is not None:
            del self._begun[image.hash]
            self._store.put(image.hash, encoded)
        return arrays

    def _begin(self, image: Image) -> LazyImage:
        assert self._vision is not None, "sequences have images where there is a tower"
        dtype, count, table = np.dtype(image.dtype), prod(image.shape), None
        behind = 4 * prod(TABLE) if dtype == np.uint8 else 0
        size = count * dtype.itemsize
        with attach(image.shm, size + behind) as view:
            pixels: Any = mx.array(np.frombuffer(view, dtype, count).reshape(image.shape))
            if behind:
                table = np.frombuffer(bytes(view[size : size + behind]), np.float32).reshape(TABLE)
        return self._vision.tower.image(pixels, image.grid, table)  # type: ignore[no-any-return]

    def columns(self, images: RowImages | None, segment: RowSegment) -> RowSegment:
        """The segment with what stands for `images` in it. Raises Stale where features are missing, ValueError where
        they are not as many as their places."""
        if images is None:
            return segment
        if images.lacks(segment.start, segment.end, self._store):
            raise Stale
        made = images.columns(segment, self._store)
        self._store.spare(images.passed(segment.end))
        return made

    def release(self, images: RowImages | None) -> None:
        """A sequence has left. What was begun for nobody else is dropped."""
        if images is None:
            return
        self._store.spare([image.hash for image in images.left])
        images.left.clear()
        for hash_ in [hash_ for hash_ in self._begun if not self._store.is_needed(hash_)]:
            del self._begun[hash_]

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Forget what a step that failed computed of images."""
        for hash_ in hashes:
            self._begun.pop(hash_, None)
            self._store.drop(hash_)

    def clear(self) -> None:
        """Forget all features that no sequence needs."""
        self._store.clear()

    def statistics(self) -> FeatureStatistics:
        return self._store.statistics()
