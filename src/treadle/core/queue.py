"""Who waits, in which order, and for how long; and which sequences belong together.

- First come, first served within a priority; a lower priority goes first.
- What is left of a group that has begun goes before everyone else, and its wait has no end: it may not be refused.
- A row that was preempted has begun, so it comes back before all who never ran. So has a row that is resumed after
  the engine was lost.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .row import Row

BEGUN = -(2**63)  # goes before every priority that a client may ask for


@dataclass(slots=True)
class _Group:
    live: int = 0
    started: bool = False


class Queue:
    """Rows that wait, and the groups of all rows that live."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Row]] = []
        self._groups: dict[str, _Group] = {}

    def enter(self, row: Row) -> None:
        """Count a new row in its group. One that is resumed has begun in an earlier life of the engine."""
        group = self._groups.setdefault(_key(row), _Group())
        group.live += 1
        group.started = group.started or row.request.resumed

    def leave(self, row: Row) -> None:
        """A row has ended. Where it waits, its place is swept by the next `head` or `sweep`."""
        group = self._groups[_key(row)]
        group.live -= 1
        if group.live == 0:
            del self._groups[_key(row)]

    def push(self, row: Row) -> None:
        priority = BEGUN if self._groups[_key(row)].started else row.request.priority
        heapq.heappush(self._heap, (priority, row.order, row))

    def head(self) -> Row | None:
        """Who is next, if anyone waits."""
        while self._heap and not self._heap[0][2].live:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """The head runs from now on, and with it its group has begun."""
        row = heapq.heappop(self._heap)[2]
        group, key = self._groups[_key(row)], _key(row)
        if not group.started and group.live > 1:
            self._heap = [(BEGUN if _key(r) == key else p, order, r) for p, order, r in self._heap]
            heapq.heapify(self._heap)
        group.started = True

    def expired(self, now: float) -> list[Row]:
        """Those whose wait is over; none of a group that has begun (D2)."""
        return [
            row
            for row in self.waiting
            if now - row.arrived >= row.request.max_wait_s and not self._groups[_key(row)].started
        ]

    def sweep(self) -> None:
        """Forget those who ended while they waited."""
        if any(not row.live for _, _, row in self._heap):
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)

    @property
    def waiting(self) -> list[Row]:
        return [row for _, _, row in self._heap if row.live]

    def check(self, live: int) -> bool:
        """Whether the groups hold `live` rows in all, and none of them is empty."""
        counts = [group.live for group in self._groups.values()]
        return sum(counts) == live and all(counts)


def _key(row: Row) -> str:
    return row.request.group or row.id
