"""Forecast of when slots come free: what `Retry-After` says, and whether waiting in the queue can help.

Each visit comes with `service_s`, the seconds that one of its rows is expected to hold a slot, computed from step times
that the warm-up measured. Two live corrections apply to all of them:

- `pace`: how long steps take now, over how long they took in the warm-up;
- the answers' share: how much of the expected time rows really needed, as many answers end before `max_tokens`.

The row at place k of the line (0: the next) gets the slot that comes free k-th. Places beyond the number of slots add
whole service times. Rows that hold a slot for longer than expected are expected to need half as long again.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

FIRST_GUESS_S = 1.0  # of a row's service time, where neither step times nor answers were measured
LONGEST_PROMISE_S = 60.0  # the official SDKs ignore a longer Retry-After and come back at once
SPREAD = 0.3  # part of the longest promise over which those are spread who get no better one
GOLDEN = 0.618034
REFRESH_S = 0.05
NEWEST = 0.2  # weight of each new measurement in a running mean; the first few count for more
LATE = 0.5  # part of the time that a late row has taken which it is expected to take on
ENOUGH_ANSWERS = 8
DOUBT = 0.5  # part of a forecast wait that is taken as certain
MOST_PROMISES = 10_000


@dataclass(slots=True, eq=False)
class Visit:
    """What one client request holds: `rows` not yet ended, their `tokens` together, and when rows of it got a slot.

    `service_s` is the expected time of one row in its slot, 0 where nothing is known; `certain` says that the expected
    time is also the likely one, as the request itself allows no more than a usual answer."""

    rows: int
    tokens: int
    entered: float
    service_s: float = 0.0
    certain: bool = False
    started: list[float] = field(default_factory=list)

    @property
    def expected_s(self) -> float:
        return self.service_s or FIRST_GUESS_S


class Forecast:
    """Expected departures of the rows that are inside, and the places in line that were promised to others."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.pace = 1.0
        self._share = 1.0
        self._answers = 0
        self._visits: dict[Visit, None] = {}
        self._rows = 0
        self._free: list[float] = []  # when each slot comes free, ascending
        self._line = 0  # rows that wait for a slot
        self._service_s = FIRST_GUESS_S
        self._made = float("-inf")
        self._promises: list[float] = []  # a heap of times
        self._beyond = 0.0
        self._idle_since: float | None = None

    # Rows come and go --------------------------------------------------------------------------------------------

    def enter(self, visit: Visit, now: float) -> None:
        """Rows of `visit` take slots, or places in the line."""
        if self._idle_since is not None and now - self._idle_since > self._service_s:
            self._promises.clear()  # slots stood free, so those who were promised one are not coming back
        for _ in range(visit.rows):
            if self._rows >= self.slots:
                self._line += 1
            elif self._free:
                self._free.pop(0)
                insort(self._free, now + self._needs_s(visit))
            self._rows += 1
        self._visits[visit] = None
        if self._rows >= self.slots:
            self._idle_since = None

    def start(self, visit: Visit, now: float) -> None:
        """A row of `visit` got its slot."""
        visit.started.append(now)

    def leave(self, visit: Visit, now: float, *, answered: bool) -> None:
        """One row of `visit` has gone: the one that began first, as rows are not told apart. `answered`: it held its
        slot for as long as it wanted."""
        self._rows -= 1
        if visit.started and answered:
            self._learn(visit, now - visit.started.pop(0))
        del visit.started[visit.rows :]
        if not visit.rows:
            del self._visits[visit]
        if self._rows < self.slots and self._idle_since is None:
            self._idle_since = now

    def reset(self, slots: int) -> None:
        """An engine has started: its steps take what its own warm-up measured. What answers need of the expected time
        stays learned."""
        self.slots = slots
        self.pace = 1.0
        self._free = []
        self._made = float("-inf")

    def step(self, ratio: float) -> None:
        """A step took `ratio` of what it took in the warm-up, with all slots taken."""
        self.pace += NEWEST * (ratio - self.pace)

    def _learn(self, visit: Visit, took_s: float) -> None:
        """Without a measured step time the expectation is a guess, which the first answer replaces."""
        share = took_s / (visit.expected_s * self.pace)
        self._answers += 1
        known = 1 if visit.service_s else 0
        self._share += max(NEWEST, 1 / (self._answers + known)) * (share - self._share)

    # The line ----------------------------------------------------------------------------------------------------

    def promise(self, rows: int, now: float) -> float:
        """Seconds until `rows` more rows are expected to have slots behind all who wait or were promised one; those
        places are promised to them from now on. At most LONGEST_PROMISE_S."""
        self._refresh(now)
        while self._promises and self._promises[0] <= now:
            heapq.heappop(self._promises)
        at = self._slot_at(self._line + len(self._promises) + rows - 1)
        wait_s = max(at - now, self._service_s / self.slots)
        if wait_s > LONGEST_PROMISE_S or len(self._promises) > MOST_PROMISES:
            return self._latest()
        for _ in range(rows):
            heapq.heappush(self._promises, now + wait_s)
        return wait_s

    def hopeless(self, now: float, max_wait_s: float) -> bool:
        """Whether one more row would wait for its slot for longer than `max_wait_s` beyond doubt."""
        if self._rows < self.slots:
            return False
        if self._answers < ENOUGH_ANSWERS and not all(visit.certain for visit in self._visits):
            return False
        self._refresh(now)
        return DOUBT * (self._slot_at(self._line) - now) > max_wait_s

    def _slot_at(self, place: int) -> float:
        """When the row at `place` of the line gets its slot."""
        turns, slot = divmod(place, self.slots)
        return self._free[slot] + turns * self._service_s

    def _latest(self) -> float:
        """The longest promise, or somewhat less: steps of the golden ratio spread any number of clients evenly, who
        would else come back as one crowd."""
        self._beyond = (self._beyond + GOLDEN) % 1.0
        return LONGEST_PROMISE_S * (1 - SPREAD * self._beyond)

    # The slots ---------------------------------------------------------------------------------------------------

    def _refresh(self, now: float) -> None:
        """Forecast all slots anew, unless that was done a moment ago."""
        if 0 <= now - self._made < REFRESH_S:
            return
        held, self._line = self._slots_held(now)
        self._free = sorted([*held, *[now] * (self.slots - len(held))])
        needs = [self._needs_s(visit) for visit in self._visits]
        self._service_s = sum(needs) / len(needs) if needs else self._share * FIRST_GUESS_S
        self._made = now

    def _slots_held(self, now: float) -> tuple[list[float], int]:
        """When each taken slot comes free, and how many rows wait. Rows that nothing is heard of yet, and for which
        there are slots, have just begun."""
        held = [self._ends(visit, at, now) for visit in self._visits for at in visit.started]
        line = 0
        for visit in self._unstarted():
            if len(held) < self.slots:
                held.append(self._ends(visit, visit.entered, now))
            else:
                line += 1
        return held[: self.slots], line

    def _unstarted(self) -> Iterator[Visit]:
        """Each visit as often as rows of it have not begun, in the order in which they came."""
        for visit in self._visits:
            for _ in range(visit.rows - len(visit.started)):
                yield visit

    def _ends(self, visit: Visit, began: float, now: float) -> float:
        """When a row of `visit` that began then is expected to leave."""
        due = began + self._needs_s(visit)
        return due if due >= now else now + max(now - due, LATE * (now - began))

    def _needs_s(self, visit: Visit) -> float:
        return visit.expected_s * self.pace * self._share
