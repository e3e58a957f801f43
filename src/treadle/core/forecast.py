"""Forecast of free slots, for `Retry-After` and for early refusals of hopeless waits.

Each lease has `service_s`, the seconds that one of its rows is expected to hold a slot, computed from step times of the
warm-up. Two live corrections apply to all leases:

- `pace`: the present duration of steps, by the tokens that a sequence gains in one, over that in the warm-up;
- the answers' share: the part of the expected time that rows really needed, as many answers end before `max_tokens`.

The row at place k of the queue (0: the next) gets the slot that comes free k-th. A slot that is taken again is held for
the mean time of recent leases. A row that holds its slot longer than expected is expected to need half as long again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..errors import TreadleError
from .virtual_queue import Arrival

FIRST_GUESS_S = 1.0  # of a row's service time, where neither step times nor answers were measured
SHORTEST_S = 0.001
REFRESH_S = 0.05
NEWEST = 0.2  # weight of each new measurement in a running mean; the first few count for more
NEWEST_LEASE = 0.05  # the same for the mean expected time of leases
LATE = 0.5  # an overdue row is expected to need this share of its elapsed time again
ENOUGH_ANSWERS = 8
DOUBT = 0.5  # part of a forecast wait that is taken as certain
TURNS = 8  # of each slot that are forecast one by one; further ones repeat the last


@dataclass(slots=True, eq=False)
class Lease:
    """Hold of an admitted request: `rows` that have not ended, their `tokens` together, and the times at which rows got
    a slot (`started`).

    - `service_s`: expected seconds of a row in its slot, 0 if unknown; `certain` if the request allows no more.
    - `arrival`: its arrival; `asked`: the rows it came with; `max_wait_s`: their longest wait.
    - `began`: a row has started. `give_way`: takes the lease back before that, with the error for its client; None
      while it can't be taken back. `displaced`: it was called, and the rows only wait for their ends.
    - `interrupted`: the engine was lost meanwhile, so the times of its rows say nothing about others.
    - `upcoming`: sequences of the request that come after its rows, each in the place of one that has ended; `vacant`:
      places that were left for them.
    """

    rows: int
    tokens: int
    entered: float
    service_s: float = 0.0
    certain: bool = False
    started: list[float] = field(default_factory=list)
    arrival: Arrival = field(default_factory=Arrival)
    began: bool = False
    give_way: Callable[[TreadleError], None] | None = None
    displaced: bool = False
    asked: int = 1
    max_wait_s: float = 0.0
    interrupted: bool = False
    upcoming: int = 0
    vacant: int = 0

    @property
    def expected_s(self) -> float:
        return self.service_s or FIRST_GUESS_S


class Forecast:
    """Expected ends of the admitted rows."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.pace = 1.0
        self.waiting = 0  # rows inside that have no slot, as of the last refresh
        self.service_s = FIRST_GUESS_S  # the expected time of a row that comes next in its slot, likewise
        self._share = 1.0
        self._answers = 0
        self._leases: dict[Lease, None] = {}
        self._seen = 0
        self._mean_s = FIRST_GUESS_S
        self._rows = 0
        self._ends: list[float] = []  # when the rows in slots leave, ascending
        self._slots: list[float] = []  # a heap: when each slot comes free after the turns that are listed
        self._turns: list[float] = []  # when a slot comes free for the row at each place of the line
        self._made = float("-inf")
        self._away_since: float | None = None
        self._back_s: Callable[[], float] = lambda: 0.0

    # Rows come and go --------------------------------------------------------------------------------------------

    def enter(self, lease: Lease) -> None:
        """Add the rows of `lease`, which take slots or wait."""
        self._rows += lease.rows
        self._leases[lease] = None
        self._seen += 1
        self._mean_s += max(NEWEST_LEASE, 1 / self._seen) * (lease.expected_s - self._mean_s)
        self._made = float("-inf")

    def start(self, lease: Lease, now: float) -> None:
        """Record that a row of `lease` got its slot."""
        lease.started.append(now)
        lease.began = True
        self._made = float("-inf")

    def leave(self, lease: Lease, now: float, *, answered: bool) -> None:
        """Remove a row of `lease`: the one that started first, as rows are not told apart. `answered`: it held its slot
        for as long as it needed."""
        self._rows -= 1
        if answered:
            self.vacate(lease, now)
        del lease.started[lease.rows :]
        if not lease.rows:
            del self._leases[lease]
        self._made = float("-inf")

    def vacate(self, lease: Lease, now: float) -> None:
        """Record that a row of `lease` has left its slot, answered; it may go on with its request's next sequence."""
        if lease.started:
            took_s = now - lease.started.pop(0)
            if not lease.interrupted:
                self._learn(lease, took_s)
        self._made = float("-inf")

    def reset(self, slots: int) -> None:
        """Start anew for a new engine, whose steps take what its own warm-up measured. The answers' share is kept."""
        self.slots = slots
        self.pace = 1.0
        self._made = float("-inf")

    def pause(self, now: float, back_s: Callable[[], float]) -> bool:
        """Stop the clock of all rows while the engine is away, for about `back_s()` seconds. Return
        whether the engine was present until now."""
        is_first = self._away_since is None
        if is_first:
            self._away_since = now
        self._back_s = back_s
        self._made = float("-inf")
        return is_first

    def resume(self, now: float) -> float | None:
        """Restart the clock of all rows. Return the time since which the engine was away; None if it was not."""
        since, self._away_since = self._away_since, None
        if since is not None:
            for lease in self._leases:
                lease.started = [at + now - since for at in lease.started]
        self._made = float("-inf")
        return since

    def step(self, ratio: float) -> None:
        """Record that a step took `ratio` times the warm-up's for each token of a sequence, with all slots taken."""
        self.pace += NEWEST * (ratio - self.pace)

    def _learn(self, lease: Lease, took_s: float) -> None:
        """Update the answers' share. Without a measured step time the expectation is a guess, which the first answer
        replaces."""
        share = took_s / (lease.expected_s * self.pace)
        self._answers += 1
        known = 1 if lease.service_s else 0
        self._share += max(NEWEST, 1 / (self._answers + known)) * (share - self._share)

    # The line ----------------------------------------------------------------------------------------------------

    def slot_at(self, place: int, now: float) -> float:
        """Return the time at which the row at `place` of the queue gets its slot; 0 is the next one."""
        self.refresh(now)
        known = TURNS * self.slots
        rounds = max(0, (place - known) // self.slots + 1)
        near = place - rounds * self.slots
        while len(self._turns) <= near:
            at = self._slots[0]
            heapq.heapreplace(self._slots, at + self.service_s)
            self._turns.append(at)
        return self._turns[near] + rounds * self.service_s

    def departures(self, until: float, now: float) -> int:
        """Return the number of slots that are taken now and expected to be free by `until`."""
        self.refresh(now)
        return bisect_right(self._ends, until)

    def tokens_freed(self, until: float, now: float) -> int:
        """Return the tokens of rows that are expected to end by `until`."""
        return sum(tokens for at, tokens in self._token_ends(now) if at <= until)

    def tokens_at(self, missing: int, now: float) -> float:
        """Return the time at which `missing` tokens are expected to be free; at the latest when all running rows have
        ended."""
        last = now
        for at, tokens in sorted(self._token_ends(now)):
            last, missing = at, missing - tokens
            if missing <= 0:
                break
        return last

    def opens_at(self, now: float) -> float:
        """Return the time at which the engine is expected to take work: now, unless it is away."""
        return sum(self._as_of(now))

    @property
    def knows(self) -> bool:
        """Whether any lease was seen."""
        return self._seen > 0

    @property
    def gap_s(self) -> float:
        """Mean seconds between two ends of rows on a full server."""
        return self.service_s / self.slots

    def hopeless(self, ahead: int, now: float, max_wait_s: float) -> bool:
        """Whether one more row, behind `ahead` waiting ones, would surely wait longer than `max_wait_s` for its
        slot."""
        if self._rows < self.slots:
            return False
        if self._answers < ENOUGH_ANSWERS and not all(lease.certain for lease in self._leases):
            return False
        return DOUBT * (self.slot_at(ahead, now) - now) > max_wait_s

    # The slots ---------------------------------------------------------------------------------------------------

    def refresh(self, now: float) -> None:
        """Forecast all slots anew, unless that was done within REFRESH_S."""
        if 0 <= now - self._made < REFRESH_S:
            return
        as_of, later_s = self._as_of(now)
        held, self.waiting = self._slots_held(as_of)
        self._ends = sorted(at + later_s for at in held)
        self._slots = [*[as_of + later_s] * (self.slots - len(held)), *self._ends]  # ascending is a heap
        self._turns = []
        self.service_s = max(SHORTEST_S, self._mean_s * self.pace * self._share)
        self._made = now

    def _as_of(self, now: float) -> tuple[float, float]:
        """Return the time at which rows are looked at, and the seconds by which the engine's absence delays them."""
        if self._away_since is None:
            return now, 0.0
        return self._away_since, now + self._back_s() - self._away_since

    def _slots_held(self, now: float) -> tuple[list[float], int]:
        """Return when each taken slot comes free, and the number of waiting rows. Rows without a report, if there are
        slots for them, count as just started."""
        held = [self._end_of(lease, at, now) for lease in self._leases for at in lease.started]
        line = 0
        for lease in self._unstarted():
            if len(held) < self.slots:
                held.append(self._end_of(lease, lease.entered, now))
            else:
                line += 1
        return held[: self.slots], line

    def _unstarted(self) -> Iterator[Lease]:
        """Yield each lease once for each of its rows that has not started, in the order of arrival."""
        for lease in self._leases:
            if not lease.displaced:
                for _ in range(lease.rows - len(lease.started)):
                    yield lease

    def _token_ends(self, now: float) -> Iterator[tuple[float, int]]:
        as_of, later_s = self._as_of(now)
        for lease in self._leases:
            for at in lease.started:
                yield self._end_of(lease, at, as_of) + later_s, lease.tokens // lease.rows

    def _end_of(self, lease: Lease, began: float, now: float) -> float:
        """Return the time at which a row of `lease` that started at `began` is expected to end."""
        due = began + self._needs_s(lease)
        return due if due >= now else now + max(now - due, LATE * (now - began))

    def _needs_s(self, lease: Lease) -> float:
        return lease.expected_s * self.pace * self._share
