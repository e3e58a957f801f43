"""Features of images, kept by the image's hash under a byte budget: the least recently used ones go first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from ...core.statistics import FeatureStatistics
from ..mlxvlm import Encoded


class FeatureStore:
    """Features of images. Those that are needed are kept whatever they take, others while all take `budget` bytes at
    most."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: dict[bytes, Encoded] = {}
        self._spare: OrderedDict[bytes, None] = OrderedDict()  # those that nobody needs, the least recently used first
        self._needs: Counter[bytes] = Counter()
        self._bytes = self._needed_bytes = self._stored = self._evicted = 0

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._kept

    def get(self, hash_: bytes) -> Encoded | None:
        """Return an image's features, if they are kept. This is a use of them."""
        if hash_ in self._spare:
            self._spare.move_to_end(hash_)
        return self._kept.get(hash_)

    def put(self, hash_: bytes, encoded: Encoded) -> None:
        """Keep the features of an image, and evict others for them."""
        self.drop(hash_)
        self._kept[hash_] = encoded
        self._bytes += _nbytes(encoded)
        self._stored += 1
        if self.is_needed(hash_):
            self._needed_bytes += _nbytes(encoded)
        else:
            self._spare[hash_] = None
        self._trim()

    def drop(self, hash_: bytes) -> None:
        """Forget the features of an image, whoever needs them."""
        if (found := self._kept.pop(hash_, None)) is not None:
            self._bytes -= _nbytes(found)
            if hash_ in self._spare:
                del self._spare[hash_]
            else:
                self._needed_bytes -= _nbytes(found)

    def need(self, hash_: bytes) -> None:
        """Keep the features of an image, those to come too, until they are spared as often as they were needed."""
        self._needs[hash_] += 1
        if hash_ in self._spare:
            del self._spare[hash_]
            self._needed_bytes += _nbytes(self._kept[hash_])

    def spare(self, hashes: Iterable[bytes]) -> None:
        """Take back a `need` of each of `hashes`."""
        for hash_ in hashes:
            self._needs[hash_] -= 1
            if not self._needs[hash_]:
                del self._needs[hash_]
                if (found := self._kept.get(hash_)) is not None:
                    self._spare[hash_] = None
                    self._needed_bytes -= _nbytes(found)
        self._trim()

    def is_needed(self, hash_: bytes) -> bool:
        return hash_ in self._needs

    def _trim(self) -> None:
        while self._spare and self._bytes > self._budget:
            self.drop(next(iter(self._spare)))
            self._evicted += 1

    def clear(self) -> None:
        """Forget all features that nobody needs."""
        for hash_ in list(self._spare):
            self.drop(hash_)

    def statistics(self) -> FeatureStatistics:
        return FeatureStatistics(
            stored=self._stored,
            evicted=self._evicted,
            held=len(self._kept),
            held_bytes=self._bytes,
            needed_bytes=self._needed_bytes,
        )


def _nbytes(encoded: Encoded) -> int:
    return sum(int(array.nbytes) for array in (encoded.rows, *encoded.deepstack))
