"""A vision tower that counts layers, for the runner that computes hashes (`drive`)."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.core.image import Image, VisionCapabilities
from treadle.core.messages import Submit
from treadle.core.plan import Encode, StepPlan


class HashTower:
    """Keeps, for each image by its hash, the layers that were computed of it, and features once they all are. At most
    `most` images are kept that no row needs, the latest ones."""

    def __init__(self, vision: VisionCapabilities, most: int = 2) -> None:
        self.vision = vision
        self.most = most
        self.computed = 0  # layers
        self._layers: dict[bytes, int] = {}
        self._kept: dict[bytes, None] = {}
        self._hashes: dict[Encode, bytes] = {}

    def has_features(self, hash_: bytes) -> bool:
        return hash_ in self._kept

    def encode(self, request: Submit, encode: Encode) -> bool:
        """Whether the layers before those of the plan were computed."""
        image = request.images[encode.image]
        assert image.hash not in self._kept, "an image that is kept is encoded again"
        assert encode.count > 0, "no layers"
        assert encode.start + encode.count <= self.vision.layers, "more layers than there are"
        if encode.start and self._layers.get(image.hash) != encode.start:
            return False
        self.computed += encode.count
        self._hashes[encode] = image.hash
        self._layers[image.hash] = encode.start + encode.count
        if self._layers[image.hash] == self.vision.layers:
            self._kept[image.hash] = None
            del self._layers[image.hash]
        return True

    def serves(self, images: Iterable[Image], start: int, count: int) -> bool:
        """Whether a chunk has the features that it needs; it must not split an image where they are computed whole."""
        end = start + count
        inside = [image for image in images if image.start < end and image.end > start]
        assert not (self.vision.whole and any(image.end > end for image in inside)), "a chunk splits an image"
        return all(image.hash in self._kept for image in inside)

    def drop(self, plan: StepPlan) -> None:
        """Forget what a plan that failed computed."""
        for encode in plan.encode:
            hash_ = self._hashes.get(encode, b"")
            self._layers.pop(hash_, None)
            self._kept.pop(hash_, None)

    def trim(self, rows: Iterable[tuple[Submit, int]]) -> None:
        """Evict what none of `rows` needs, given with how much of each is computed."""
        needed = {image.hash for request, done in rows for image in request.images if image.end > done}
        self._layers = {hash_: layers for hash_, layers in self._layers.items() if hash_ in needed}
        idle = [hash_ for hash_ in self._kept if hash_ not in needed]
        for hash_ in idle[: max(0, len(idle) - self.most)]:
            del self._kept[hash_]
