"""Bounded, fair queue of work items, each with a deadline for getting a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...errors import Busy, TreadleError
from .fair_queue import FairQueue

MAX_PENDING = 256


@dataclass(eq=False, kw_only=True)
class QueuedItem:
    """A call of `tenant`, from its caller to its result, and the timer of its deadline while it is queued."""

    tenant: str
    result: asyncio.Future[Any]
    expiry: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """Bytes of its input."""
        raise NotImplementedError

    def resolve(self, outcome: Any) -> None:
        """Set the result or the error, unless the item is already done."""
        if self.result.done():
            return
        if isinstance(outcome, TreadleError):
            self.result.set_exception(outcome)
        else:
            self.result.set_result(outcome)


T = TypeVar("T", bound=QueuedItem)


@dataclass(frozen=True)
class QueueWords:
    """Reasons of refusals: `full` of an item for which there is no place, `late` of one that got no worker in time."""

    full: str = "too many prompts wait to be tokenized"
    late: str = "no text worker came free"


class ItemQueue(Generic[T]):
    """Queue of at most MAX_PENDING items. An item that gets no worker within `max_wait_s` seconds fails with Busy.

    `busy` makes that error from its reason, and counts the refusal.
    """

    def __init__(self, max_wait_s: float, busy: Callable[[str], Busy], words: QueueWords | None = None) -> None:
        self._max_wait_s = max_wait_s
        self._busy = busy
        self._words = words or QueueWords()
        self._queue: FairQueue[T] = FairQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: T) -> None:
        """Queue an item. If the queue is full, the newest item of the tenant with the most is displaced; raises Busy
        when that tenant is the item's own."""
        self._make_room(item.tenant)
        self._start_deadline(item)
        self._queue.put(item.tenant, item, item.size)

    def put_back(self, item: T) -> None:
        """Queue an item again, first in line and with a new deadline, after its worker was lost."""
        if not item.result.done():
            self._start_deadline(item)
            self._queue.put_back(item.tenant, item)

    def take(self, fits: Callable[[T], bool] = lambda item: True) -> T:
        """Return the next item that fits, with its deadline stopped. Raises IndexError when there is none."""
        item = self._queue.take(fits)
        assert item.expiry is not None
        item.expiry.cancel()
        return item

    def remove(self, item: T) -> None:
        """Remove an item whose caller has left, if it is still queued, and stop its deadline."""
        if item.expiry is not None:
            item.expiry.cancel()
        self._queue.remove(item.tenant, item)

    def _make_room(self, tenant: str) -> None:
        if len(self._queue) < MAX_PENDING:
            return
        displaced = self._queue.displace(tenant)
        if displaced is None:
            raise self._busy(self._words.full)
        displaced.resolve(self._busy(self._words.full))

    def _start_deadline(self, item: T) -> None:
        item.expiry = asyncio.get_running_loop().call_later(self._max_wait_s, self._expire, item)

    def _expire(self, item: T) -> None:
        if self._queue.remove(item.tenant, item):
            item.resolve(self._busy(f"{self._words.late} within {self._max_wait_s:g} s"))
