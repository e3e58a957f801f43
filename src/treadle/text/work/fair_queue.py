"""Fair queue of waiting work: round-robin between tenants."""

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
        """Put an item first in the queue, after it was taken before."""
        self._waiting.setdefault(tenant, deque()).appendleft(item)
        self._waiting.move_to_end(tenant, last=False)
        self._count += 1

    def take(self) -> T:
        """Remove and return the next item; its tenant is served last from now. Raises IndexError when empty."""
        if not self._waiting:
            raise IndexError("the queue is empty")
        tenant, items = next(iter(self._waiting.items()))
        item = items.popleft()
        self._count -= 1
        if items:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        return item

    def displace(self, tenant: str) -> T | None:
        """Remove and return the newest item of the tenant with the most, in favour of an item of `tenant`. None if that
        tenant would then hold less than `tenant`."""
        richest, items = max(self._waiting.items(), key=lambda load_object: len(load_object[1]))
        if len(items) - 1 < self.held(tenant) + 1:
            return None
        item = items[-1]
        self.remove(richest, item)
        return item

    def held(self, tenant: str) -> int:
        """Return the number of queued items of `tenant`."""
        return len(self._waiting.get(tenant, ()))

    def remove(self, tenant: str, item: T) -> bool:
        """Remove an item; False if it is no longer queued."""
        items = self._waiting.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._count -= 1
        if not items:
            del self._waiting[tenant]
        return True
