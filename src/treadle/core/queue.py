"""The queue of waiting rows: their order, how long they may wait, and which sequences belong together.

- A lower priority goes first. Within a priority tenants are served in turn: the one with the fewest running rows, of
  those the one that was served longest ago, and first come, first served within a tenant. One tenant alone: FIFO.
- What is left of a group that has begun goes before everyone else, and its wait has no end: it may not be refused.
- A row that was preempted has begun, so it comes back before all who never ran. So has a row that is resumed after
  the engine was lost.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .sequence import Sequence

BEGUN = -(2**63)  # goes before every priority that a client may ask for


@dataclass(slots=True)
class _Group:
    live: int = 0
    started: bool = False


@dataclass(slots=True)
class _Tenant:
    """`waiting` is a heap of (priority, order, row); `served` numbers the admissions, the last one of this tenant."""

    waiting: list[tuple[int, int, Sequence]] = field(default_factory=list)
    live: int = 0
    served: int = 0


class Queue:
    """Rows that wait, and the groups and tenants of all rows that live."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._groups: dict[str, _Group] = {}
        self._served = 0
        self._entries = 0  # in all heaps, with those that ended and are not swept yet

    def enter(self, row: Sequence) -> None:
        """Count a new row in its group and for its tenant. One that is resumed has begun in an earlier life of the
        engine."""
        group = self._groups.setdefault(_key(row), _Group())
        group.live += 1
        group.started = group.started or row.request.resumed
        self._tenants.setdefault(row.request.tenant, _Tenant()).live += 1

    def leave(self, row: Sequence) -> None:
        """A row has ended. Where it waits, its place is swept by the next `head` or `sweep`."""
        group = self._groups[_key(row)]
        group.live -= 1
        if group.live == 0:
            del self._groups[_key(row)]
        tenant = self._tenants[row.request.tenant]
        tenant.live -= 1
        if tenant.live == 0:
            self._entries -= len(tenant.waiting)
            del self._tenants[row.request.tenant]

    def push(self, row: Sequence) -> None:
        priority = BEGUN if self._groups[_key(row)].started else row.request.priority
        heapq.heappush(self._tenants[row.request.tenant].waiting, (priority, row.order, row))
        self._entries += 1

    def head(self, running: Iterable[Sequence] = ()) -> Sequence | None:
        """The row that is next, if any waits, while `running` hold slots."""
        if not self._entries:
            return None
        self.sweep()
        able = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if len(able) <= 1:
            return able[0].waiting[0][2] if able else None
        held = Counter(row.request.tenant for row in running)
        return min(able, key=lambda tenant: _turn(tenant, held)).waiting[0][2]

    def pop(self, row: Sequence) -> None:
        """`row`, the head, runs from now on, and with it its group has begun."""
        tenant = self._tenants[row.request.tenant]
        heapq.heappop(tenant.waiting)
        self._entries -= 1
        self._served += 1
        tenant.served = self._served
        group, key = self._groups[_key(row)], _key(row)
        if not group.started and group.live > 1:
            tenant.waiting = [(BEGUN if _key(r) == key else p, order, r) for p, order, r in tenant.waiting]
            heapq.heapify(tenant.waiting)
        group.started = True

    def expired(self, now: float) -> list[Sequence]:
        """Those whose wait is over; none of a group that has begun (D2)."""
        if not self._entries:
            return []
        return [
            row
            for row in self.waiting
            if now - row.arrived >= row.request.max_wait_s and not self._groups[_key(row)].started
        ]

    def sweep(self) -> None:
        """Forget those who ended while they waited."""
        if not self._entries:
            return
        for tenant in self._tenants.values():
            if any(not row.live for _, _, row in tenant.waiting):
                self._entries -= len(tenant.waiting)
                tenant.waiting = [entry for entry in tenant.waiting if entry[2].live]
                self._entries += len(tenant.waiting)
                heapq.heapify(tenant.waiting)

    @property
    def waiting(self) -> list[Sequence]:
        return [row for tenant in self._tenants.values() for _, _, row in tenant.waiting if row.live]

    def check(self, live: int) -> bool:
        """Whether groups and tenants each hold `live` rows in all, and none of them is empty."""
        books = (
            [group.live for group in self._groups.values()],
            [tenant.live for tenant in self._tenants.values()],
        )
        return all(sum(counts) == live and all(counts) for counts in books)


def _turn(tenant: _Tenant, held: Counter[str]) -> tuple[int, int, int, int]:
    priority, order, row = tenant.waiting[0]
    return priority, held[row.request.tenant], tenant.served, order


def _key(row: Sequence) -> str:
    return row.request.group or row.id
