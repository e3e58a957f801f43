"""Waiting pieces of work, taken in turn from each tenant: a flood of one does not starve another."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out within a tenant, round-robin between tenants."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: T) -> None:
        self._waiting.setdefault(tenant, deque()).append(item)
        self._count += 1

    def put_back(self, tenant: str, item: T) -> None:
        """In front of everything: its turn had come before."""
        self._waiting.setdefault(tenant, deque()).appendleft(item)
        self._waiting.move_to_end(tenant, last=False)
        self._count += 1

    def take(self) -> T:
        """The next item; its tenant's turn comes again after all others'. Raises IndexError where none waits."""
        if not self._waiting:
            raise IndexError("nothing waits")
        tenant, items = next(iter(self._waiting.items()))
        item = items.popleft()
        self._count -= 1
        if items:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        return item

    def displace(self, tenant: str) -> T | None:
        """Take out the newest item of the tenant that has the most, so that `tenant` gets its place. None where that
        would leave that one with less than `tenant`."""
        richest, items = max(self._waiting.items(), key=lambda entry: len(entry[1]))
        if len(items) - 1 < self.held(tenant) + 1:
            return None
        item = items[-1]
        self.remove(richest, item)
        return item

    def held(self, tenant: str) -> int:
        """The number of items of `tenant` that wait."""
        return len(self._waiting.get(tenant, ()))

    def remove(self, tenant: str, item: T) -> bool:
        """Take back an item; False where it no longer waits."""
        items = self._waiting.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._count -= 1
        if not items:
            del self._waiting[tenant]
        return True
