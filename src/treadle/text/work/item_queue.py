"""Bounded, fair queue of work items, each with a deadline for getting a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...errors import Busy
from .fair_queue import FairQueue
from .work_item import WorkItem

MAX_PENDING = 256


class ItemQueue:
    """Queue of at most MAX_PENDING items. An item that gets no worker within `max_wait_s` seconds fails with Busy.

    `busy` makes that error from its reason, and counts the refusal.
    """

    def __init__(self, max_wait_s: float, busy: Callable[[str], Busy]) -> None:
        self._max_wait_s = max_wait_s
        self._busy = busy
        self._queue: FairQueue[WorkItem] = FairQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: WorkItem) -> None:
        """Queue an item. If the queue is full, the newest item of the tenant with the most is displaced; raises Busy
        when that tenant is the item's own."""
        self._make_room(item.tenant)
        self._start_deadline(item)
        self._queue.put(item.tenant, item, len(item.order.params) + len(item.payload))

    def put_back(self, item: WorkItem) -> None:
        """Queue an item again, first in line and with a new deadline, after its worker was lost."""
        if not item.result.done():
            self._start_deadline(item)
            self._queue.put_back(item.tenant, item)

    def take(self) -> WorkItem:
        """Return the next item, with its deadline stopped. Raises IndexError when the queue is empty."""
        item = self._queue.take()
        assert item.expiry is not None
        item.expiry.cancel()
        return item

    def remove(self, item: WorkItem) -> None:
        """Remove an item whose caller has left, if it is still queued, and stop its deadline."""
        if item.expiry is not None:
            item.expiry.cancel()
        self._queue.remove(item.tenant, item)

    def _make_room(self, tenant: str) -> None:
        if len(self._queue) < MAX_PENDING:
            return
        why = "too many prompts wait to be tokenized"
        displaced = self._queue.displace(tenant)
        if displaced is None:
            raise self._busy(why)
        displaced.resolve(self._busy(why))

    def _start_deadline(self, item: WorkItem) -> None:
        item.expiry = asyncio.get_running_loop().call_later(self._max_wait_s, self._expire, item)

    def _expire(self, item: WorkItem) -> None:
        if self._queue.remove(item.tenant, item):
            item.resolve(self._busy(f"no text worker came free within {self._max_wait_s:g} s"))
