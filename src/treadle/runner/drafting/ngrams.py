"""Indexes of n-grams: the earlier places in a text at which its last tokens stand.

An index yields candidates, latest first, as the position behind the n-gram. Different n-grams may share a hash, so its
user compares the tokens (`common_context`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

N = 3
"""Tokens of an n-gram."""
CANDIDATES = 8
"""Most places that an index returns."""
MOST_INDEXED = 1 << 18
"""Most tokens of a fixed text in an index: its last ones."""
GENERATION = 1 << 14
"""A growing index forgets n-grams in whole generations of this many."""

_SHIFT = 21  # more than the bits of a token id: keys of real vocabularies are exact
_MIX = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio (Knuth's multiplicative hash)
_PLACES = (1 << 24) - 1
_HASHES = (1 << 64) - 1 - _PLACES


def key_at(tokens: Sequence[int], end: int) -> int:
    """Return the key of the n-gram in front of position `end`, which is `N` or more."""
    return tokens[end - 3] << 2 * _SHIFT ^ tokens[end - 2] << _SHIFT ^ tokens[end - 1]


def common_context(one: Sequence[int], end: int, other: Sequence[int], other_end: int, most: int) -> int:
    """Return how many of the last tokens of `one[:end]` and `other[:other_end]` are the same, `most` at most."""
    most, same = min(most, end, other_end), 0
    while same < most and one[end - 1 - same] == other[other_end - 1 - same]:
        same += 1
    return same


class FixedNgrams:
    """Index of a text that does not change: one sorted array, 8 bytes a token, of hashes (40 bits) with positions."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._first = max(0, len(tokens) - MOST_INDEXED)
        ids = np.frombuffer(array("q", tokens[self._first :]), np.uint64)
        count = max(0, len(ids) - N + 1)
        keys = ids[:count] << np.uint64(2 * _SHIFT)
        keys ^= ids[1 : count + 1] << np.uint64(_SHIFT)
        keys ^= ids[2 : count + 2]
        keys *= np.uint64(_MIX)
        keys &= np.uint64(_HASHES)
        keys |= np.arange(count, dtype=np.uint64)
        keys.sort()
        self._entries = keys

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes

    def ends(self, key: int) -> Iterator[int]:
        """Yield the positions behind the latest n-grams with this key's hash."""
        hashed = key * _MIX & _HASHES
        low = int(self._entries.searchsorted(np.uint64(hashed)))
        found = self._entries[low:]
        if not len(found) or int(found[0]) & _HASHES != hashed:
            return
        count = int(found.searchsorted(np.uint64(hashed | _PLACES), "right"))
        for entry in found[max(0, count - CANDIDATES) : count][::-1].tolist():
            yield self._first + (entry & _PLACES) + N


class GrowingNgrams:
    """Index of the tokens behind `start` of a text that grows. The positions behind an n-gram form a chain, latest
    first. The chains' heads are kept for the last one to two generations of n-grams."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._earlier = array("i")  # by position: the one before it in its chain, or 0
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of n-grams that can be found."""
        return len(self._young) + len(self._old)

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Index the n-grams of `tokens` up to position `end`."""
        for at in range(self._start + len(self._earlier) + 1, end + 1):
            if at < N:
                self._earlier.append(0)
                continue
            key = key_at(tokens, at)
            self._earlier.append(self._young.get(key) or self._old.get(key, 0))
            self._young[key] = at
            if len(self._young) == GENERATION:
                self._old, self._young = self._young, {}

    def ends(self, key: int) -> Iterator[int]:
        """Yield the positions behind the latest n-grams with this key."""
        at = self._young.get(key) or self._old.get(key, 0)
        for _ in range(CANDIDATES):
            if not at:
                return
            yield at
            at = self._earlier[at - self._start - 1]
