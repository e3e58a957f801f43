"""Fair queue of waiting work: round-robin between tenants, and small items of a tenant before its large ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Backlog(Generic[T]):
    """Items of one tenant, in order of arrival, with their sizes in bytes.

    Work takes time by its size. Items of one order of magnitude are first in, first out; the magnitudes get equal
    numbers of bytes (start-time fair queueing). So a small item passes many large ones, and none waits forever.
    """

    def __init__(self) -> None:
        self.items: list[T] = []
        self._sizes: list[int] = []
        self._starts: dict[int, int] = {}  # by orders of magnitude: the virtual time at which the next item may begin
        self._now = 0

    def append(self, item: T, size: int) -> None:
        self.items.append(item)
        self._sizes.append(size)

    def put_back(self, item: T) -> None:
        self.items.insert(0, item)
        self._sizes.insert(0, 0)

    def take(self, places: list[int]) -> T:
        """Remove and return the next one of the items at `places`."""
        place = min(places, key=self._start)
        self._now, size = self._start(place), self._sizes[place]
        self._starts[size.bit_length()] = self._now + size
        return self.pop(place)

    def pop(self, place: int) -> T:
        del self._sizes[place]
        return self.items.pop(place)

    def _start(self, place: int) -> int:
        return max(self._now, self._starts.get(self._sizes[place].bit_length(), 0))


class FairQueue(Generic[T]):
    """Queue that takes items of each tenant in turn; of one tenant in the order of `_Backlog`."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, _Backlog[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: T, size: int = 0) -> None:
        """Queue an item of `size` bytes."""
        self._waiting.setdefault(tenant, _Backlog()).append(item, size)
        self._count += 1

    def put_back(self, tenant: str, item: T) -> None:
        """Put an item first in the queue, after it was taken before."""
        self._waiting.setdefault(tenant, _Backlog()).put_back(item)
        self._waiting.move_to_end(tenant, last=False)
        self._count += 1

    def take(self, fits: Callable[[T], bool] = lambda item: True) -> T:
        """Remove and return the next item that fits; its tenant is served last from now. Raises IndexError when there
        is none."""
        tenant, backlog, places = self._first(fits)
        item = backlog.take(places)
        self._count -= 1
        if backlog.items:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        return item

    def _first(self, fits: Callable[[T], bool]) -> tuple[str, _Backlog[T], list[int]]:
        """Return the tenant that is served next, its backlog, and the places of its items that fit."""
        for tenant, backlog in self._waiting.items():
            if places := [place for place, item in enumerate(backlog.items) if fits(item)]:
                return tenant, backlog, places
        raise IndexError("the queue has no such item")

    def displace(self, tenant: str) -> T | None:
        """Remove and return the newest item of the tenant with the most, in favour of an item of `tenant`. None if that
        tenant would then hold less than `tenant`."""
        richest, backlog = max(self._waiting.items(), key=lambda entry: len(entry[1].items))
        if len(backlog.items) - 1 < self.held(tenant) + 1:
            return None
        item = backlog.items[-1]
        self.remove(richest, item)
        return item

    def held(self, tenant: str) -> int:
        """Return the number of queued items of `tenant`."""
        backlog = self._waiting.get(tenant)
        return 0 if backlog is None else len(backlog.items)

    def remove(self, tenant: str, item: T) -> bool:
        """Remove an item; False if it is no longer queued."""
        backlog = self._waiting.get(tenant)
        if backlog is None or item not in backlog.items:
            return False
        backlog.pop(backlog.items.index(item))
        self._count -= 1
        if not backlog.items:
            del self._waiting[tenant]
        return True
