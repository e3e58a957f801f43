"""Queue of waiting sequences: their order, their longest waits, and the groups they belong to.

- A lower priority goes first. Within a priority tenants are served in turn: first the one with the fewest running
  sequences, then the one served longest ago; FIFO within a tenant.
- The rest of a group that has started goes before all others and does not expire: it may not be refused any more.
- A sequence whose grammar is not compiled is held: others pass it, and it may expire like a waiting one.
- A preempted sequence has started, so it goes before all that never ran. So does one resumed after the engine was lost.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .sequence import Sequence

STARTED = -(2**63)  # before every priority of a client


@dataclass(slots=True)
class _Group:
    live: int = 0
    started: bool = False


@dataclass(slots=True)
class _Tenant:
    """A tenant's `waiting` heap of (priority, order, sequence); `served` is the number of its last admission."""

    waiting: list[tuple[int, int, Sequence]] = field(default_factory=list)
    live: int = 0
    served: int = 0


class Queue:
    """Waiting sequences, and the groups and tenants of all live ones."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._groups: dict[str, _Group] = {}
        self.held: dict[Sequence, None] = {}  # in the order in which they came
        self._served = 0
        self._entries = 0  # in all heaps, including ended ones not yet swept

    def add(self, seq: Sequence) -> None:
        """Count a new sequence in its group and for its tenant. The group of a resumed one has started."""
        group = self._groups.setdefault(_key(seq), _Group())
        group.live += 1
        group.started = group.started or seq.request.resumed
        self._tenants.setdefault(seq.request.tenant, _Tenant()).live += 1

    def remove(self, seq: Sequence) -> None:
        """Count out a sequence that has ended. If it waits, the next `head` or `sweep` drops its entry."""
        self.held.pop(seq, None)
        group = self._groups[_key(seq)]
        group.live -= 1
        if group.live == 0:
            del self._groups[_key(seq)]
        tenant = self._tenants[seq.request.tenant]
        tenant.live -= 1
        if tenant.live == 0:
            self._entries -= len(tenant.waiting)
            del self._tenants[seq.request.tenant]

    def hold(self, seq: Sequence) -> None:
        """Let `seq` wait for its grammar, until it is pushed."""
        self.held[seq] = None

    def push(self, seq: Sequence) -> None:
        """Let `seq` wait for a slot."""
        self.held.pop(seq, None)
        priority = STARTED if self._groups[_key(seq)].started else seq.request.priority
        heapq.heappush(self._tenants[seq.request.tenant].waiting, (priority, seq.order, seq))
        self._entries += 1

    def head(self, running: Iterable[Sequence] = ()) -> Sequence | None:
        """Return the next sequence, if any waits, while `running` ones hold slots."""
        if not self._entries:
            return None
        self.sweep()
        able = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if len(able) <= 1:
            return able[0].waiting[0][2] if able else None
        held = Counter(seq.request.tenant for seq in running)
        return min(able, key=lambda tenant: _order(tenant, held)).waiting[0][2]

    def pop(self, seq: Sequence) -> None:
        """Remove `seq`, the head, which runs from now on. Its group has started."""
        tenant = self._tenants[seq.request.tenant]
        heapq.heappop(tenant.waiting)
        self._entries -= 1
        self._served += 1
        tenant.served = self._served
        group, key = self._groups[_key(seq)], _key(seq)
        if not group.started and group.live > 1:
            tenant.waiting = [(STARTED if _key(r) == key else p, order, r) for p, order, r in tenant.waiting]
            heapq.heapify(tenant.waiting)
        group.started = True

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences that have waited too long; none of a group that has started (D2)."""
        if not (self._entries or self.held):
            return []
        return [seq for seq in self.waiting if self._may_expire(seq) and now - seq.arrived >= seq.request.max_wait_s]

    @property
    def next_expiry(self) -> float | None:
        """The time at which the next held sequence expires, if any does."""
        return min((seq.arrived + seq.request.max_wait_s for seq in self.held if self._may_expire(seq)), default=None)

    def _may_expire(self, seq: Sequence) -> bool:
        return not self._groups[_key(seq)].started

    def sweep(self) -> None:
        """Drop the entries of sequences that ended while they waited."""
        if not self._entries:
            return
        for tenant in self._tenants.values():
            if any(not seq.live for _, _, seq in tenant.waiting):
                self._entries -= len(tenant.waiting)
                tenant.waiting = [entry for entry in tenant.waiting if entry[2].live]
                self._entries += len(tenant.waiting)
                heapq.heapify(tenant.waiting)

    @property
    def waiting(self) -> list[Sequence]:
        """All waiting sequences, held ones last."""
        queued = [seq for tenant in self._tenants.values() for _, _, seq in tenant.waiting if seq.live]
        return [*queued, *self.held]

    def check(self, live: int) -> bool:
        """Whether groups and tenants each count `live` sequences in all, and none of them is empty."""
        books = (
            [group.live for group in self._groups.values()],
            [tenant.live for tenant in self._tenants.values()],
        )
        return all(sum(counters) == live and all(counters) for counters in books)


def _order(tenant: _Tenant, held: Counter[str]) -> tuple[int, int, int, int]:
    priority, order, seq = tenant.waiting[0]
    return priority, held[seq.request.tenant], tenant.served, order


def _key(seq: Sequence) -> str:
    return seq.request.group or seq.id
