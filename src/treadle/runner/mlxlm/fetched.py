"""Keys and values that layers have fetched from their caches in the present pass, for layers that attend to another's.

Models share keys and values between layers in two ways: a later layer gets an earlier one's arrays without a cache
(Gemma 4), or the earlier one's cache, which it asks for them (Gemma 3n). Both work with a cache that attends itself.
"""

from __future__ import annotations

from typing import Any


class FetchedPairs:
    """Pairs of keys and values, by the cache that returned them."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._caches: dict[int, tuple[Any, Any]] = {}

    def put(self, cache: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        """Remember, and return, what `cache` returns to its layer."""
        self._pairs[id(cache)] = keys, values
        self._caches[id(keys)] = keys, cache  # the keys stay, so that no other array takes their identity
        return keys, values

    def of(self, cache: Any) -> tuple[Any, Any]:
        """Return what the cache returned in this pass."""
        return self._pairs[id(cache)]

    def cache_of(self, keys: Any) -> Any | None:
        """Return the cache that returned `keys` in this pass; None where none did."""
        return self._caches.get(id(keys), (None, None))[1]

    def clear(self) -> None:
        """Forget a pass: its arrays would be kept."""
        self._pairs.clear()
        self._caches.clear()


FETCHED = FetchedPairs()
"""Those of the pass that the owner's thread builds."""
