"""Capacity of the gate: whether a request fits beside all promises, and when a refused one may return.

Places promised within the time that a new row would hold a slot are not given to later requests. A free slot is given
to any request, unless a ticket is due at once whose rows could not wait in the queue instead. It is kept for that no
longer than a row would have had it: a client that comes back before its time can't be told from a new one, so tickets
may be of nobody, and a server that waited for all of them would do nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .fair_share import FairShares
from .forecast import Forecast, Lease
from .refusals import Refusal
from .virtual_queue import EARLY_S, Arrival, Ticket, VirtualQueue

LONGEST_PROMISE_S = 60.0  # the official SDKs ignore a longer Retry-After and come back at once, or not at all
SHORTEST_PROMISE_S = 1.0  # where departures are further apart; else the time between two
LATENESS = 0.03  # part of a promise that is added to it: coming too early costs another request
AGAIN = 0.25  # part of the time since its first refusal that a request is told at least: forecasts err by such parts
LONGEST_AGAIN_S = 5.0
SPREAD = 0.1  # part of the longest promise over which those are spread who get no better one
GOLDEN = 0.618034
SURE = 0.01  # part of a wait by which it may turn out longer and still take no more promises
EARLY_WAIT = 0.5  # part of the longest wait that who comes back in time is expected to spend in the queue
PATIENCE = 1.0  # part of the time since its first refusal that a request may wait in the queue when it came back
LONGEST_PATIENCE_S = 30.0
IDLE_S = 2.0  # a free slot is kept for a ticket that is due within that, and no longer than a row would have it
SEVERAL_MARGIN = 1  # departures by which the forecast for several rows may be wrong: each costs all of them a return


@dataclass(frozen=True)
class GateLimits:
    """Limits of admission: places for `running` and `waiting` rows, the `tokens` that all of them may reserve (0: no
    limit), and a row's longest wait in seconds. With `by_forecast`, a request may wait only if a slot is expected
    within that time."""

    running: int
    waiting: int
    max_wait_s: float
    tokens: int = 0
    by_forecast: bool = False

    @property
    def places(self) -> int:
        return self.running + self.waiting


class AdmissionCapacity:
    """Taken and promised places. `tokens` are those that admitted rows reserve."""

    def __init__(self, limits: GateLimits, virtual_queue: VirtualQueue, shares: FairShares) -> None:
        self.limits = limits
        self.forecast = Forecast(limits.running)
        self.rows = self.tokens = 0
        self.displaced = 0  # of the rows: those whose places are taken by others, until their ends come
        self._kept_since: float | None = None  # free slots, for tickets: when the first other request came
        self._virtual_queue = virtual_queue
        self._shares = shares
        self._beyond = 0.0

    @property
    def taken(self) -> int:
        return self.rows - self.displaced

    def obstacle(self, arrival: Arrival, rows: int, tokens: int, now: float) -> Refusal | None:
        """Return why `rows` rows of `arrival` can't be admitted now; None if they can."""
        limits = self.limits
        if rows > self._free(arrival, now):
            return Refusal.QUEUE_FULL
        ahead = self._waiting_ahead(arrival, now)
        if limits.by_forecast and self.forecast.hopeless(ahead, now, self.patience_s(arrival, now)):
            return Refusal.WAIT_TOO_LONG
        if limits.tokens and self.tokens + tokens > limits.tokens:
            return Refusal.TOKENS
        reason = self._promised(arrival, rows, tokens, now)
        return None if reason is None or self._kept_long_enough(rows, now) else reason

    def take(self, rows: int, tokens: int) -> None:
        """Take the places and tokens of an admitted request."""
        self.rows += rows
        self.tokens += tokens
        self._kept_since = None

    def _kept_long_enough(self, rows: int, now: float) -> bool:
        """Whether free slots, as many as `rows`, have been kept for tickets as long as a row would have had one."""
        if self.taken + rows > self.limits.running:
            return False
        if self._kept_since is None:
            self._kept_since = now
        return now - self._kept_since >= min(IDLE_S, self.forecast.service_s)

    def patience_s(self, arrival: Arrival, now: float) -> float:
        """Return the longest wait for a slot in seconds. A client that returns on time may wait as long again as it has
        waited."""
        ticket, longest = _in_time(arrival, now), self.limits.max_wait_s
        return max(longest, min(PATIENCE * (now - ticket.since), LONGEST_PATIENCE_S)) if ticket else longest

    def _free(self, arrival: Arrival, now: float) -> int:
        """Return the free places for `arrival`. By forecast, as many clients that return on time may wait as clients
        without a ticket."""
        more = self.limits.waiting if self.limits.by_forecast and _in_time(arrival, now) else 0
        return self.limits.places + more - self.taken

    def who_gives_way(self, arrival: Arrival, rows: int) -> list[Lease]:
        """Return the leases to displace for `rows` rows of `arrival`; empty if none may be."""
        return self._shares.give_way(arrival.tenant, rows, self.taken + rows - self.limits.places)

    def promise(self, ticket: Ticket | None, arrival: Arrival, rows: int, tokens: int, now: float) -> float:
        """Put `ticket` into line, and return the seconds until a refused `arrival` is to return."""
        due = self._due(arrival, rows, tokens, now)
        wait_s = due - now
        if ticket is None or wait_s > LONGEST_PROMISE_S:
            wait_s = min(wait_s, self._latest(wait_s))
        if ticket is not None:
            self._virtual_queue.promise(ticket, due=due, back=now + wait_s, now=now)
        return wait_s

    def _promised(self, arrival: Arrival, rows: int, tokens: int, now: float) -> Refusal | None:
        """Return what `rows` rows would take from tickets ahead: places or tokens that do not come free before those
        are due."""
        if not len(self._virtual_queue):
            return None
        forecast = self.forecast
        places, room = self._free(arrival, now) - rows, self.limits.tokens - self.tokens - tokens
        idle = self.taken + rows <= self.limits.running
        needed, wanted = 0.0, 0.0
        until = now + (IDLE_S if idle else forecast.service_s)
        for due, claimed, ticket in self._virtual_queue.needs(arrival, until, now):
            needed += claimed + _margin(ticket.rows)
            wanted += claimed / ticket.rows * ticket.tokens
            if needed > places + forecast.departures(due, now) and not (idle and self._can_queue(ticket, rows, now)):
                return Refusal.PROMISED
            if self.limits.tokens and wanted > room and wanted > room + forecast.tokens_freed(due, now):
                return Refusal.TOKENS
        return None

    def _can_queue(self, ticket: Ticket, rows: int, now: float) -> bool:
        """Whether the rows of `ticket` could wait for their slots if `rows` others take the free ones."""
        if ticket.rows > self.limits.waiting:
            return False
        place = max(0, self.taken + 2 * rows + ticket.rows - 1 - self.limits.running)
        return self.forecast.slot_at(place, now) - now <= EARLY_WAIT * self.limits.max_wait_s

    def _due(self, arrival: Arrival, rows: int, tokens: int, now: float) -> float:
        """Return when `rows` rows are expected to find places, behind all waiting rows and tickets ahead: somewhat
        before slots are free, so that no slot waits for a late client."""
        forecast, limits = self.forecast, self.limits
        ahead = self._waiting_ahead(arrival, now) + round(self._virtual_queue.rows_ahead(arrival))
        early = min(limits.waiting // 2, int(EARLY_WAIT * limits.max_wait_s / forecast.gap_s))
        place = max(0, ahead + rows - 1 - early + _margin(rows))
        due = forecast.slot_at(place, now) if forecast.knows else forecast.opens_at(now)
        missing = tokens + self.tokens - limits.tokens
        if limits.tokens and missing > 0:
            due = max(due, forecast.tokens_at(missing, now))
        return now + max((1 + LATENESS) * (due - now), self._shortest_s(arrival, now))

    def _shortest_s(self, arrival: Arrival, now: float) -> float:
        waited_s = 0.0 if arrival.since is None else now - arrival.since
        return max(min(self.forecast.gap_s, SHORTEST_PROMISE_S), min(AGAIN * waited_s, LONGEST_AGAIN_S))

    def _waiting_ahead(self, arrival: Arrival, now: float) -> int:
        self.forecast.refresh(now)
        return self._shares.waiting_ahead(arrival.tenant, self.forecast.waiting)

    def _latest(self, wait_s: float) -> float:
        """Return the wait to promise where `wait_s` exceeds one promise: the longest, shortened by a golden-ratio
        sequence so that clients do not return together, and never so much that one more promise is needed."""
        self._beyond = (self._beyond + GOLDEN) % 1.0
        others = math.ceil(wait_s / LONGEST_PROMISE_S) - 1
        spare_s = max(0.0, (others + 1) * LONGEST_PROMISE_S - (1 + SURE) * wait_s)
        return LONGEST_PROMISE_S - self._beyond * min(SPREAD * LONGEST_PROMISE_S, spare_s)


def _in_time(arrival: Arrival, now: float) -> Ticket | None:
    """Return the ticket of an arrival that returns on time; None otherwise."""
    ticket = arrival.ticket
    return ticket if ticket is not None and ticket.turn - EARLY_S <= now <= ticket.until else None


def _margin(rows: int) -> int:
    return SEVERAL_MARGIN if rows > 1 else 0
