"""Tickets by tenant, and the rows expected ahead of a request.

The level of a ticket is the number of admitted rows of its tenant plus those of the tenant's earlier tickets. Tickets
of tenants with FEW or less are indexed by level. A tenant with more counts as a row of equal tickets, so that a change
of its level costs nothing; there are never many such tenants.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .tickets import Arrival, Ticket

FEW = 32
NEWEST = 0.1  # weight of each new observation in the part of tickets that are claimed


@dataclass(slots=True)
class Rows:
    """Expected rows: `known` ones, and `guesses` for requests whose number of rows is not known."""

    known: float = 0.0
    guesses: float = 0.0

    def add(self, other: Rows, times: float = 1.0) -> None:
        self.known += times * other.known
        self.guesses += times * other.guesses


@dataclass(slots=True, eq=False)
class TenantTickets:
    """A tenant's tickets in line, in arrival order. `claimed` is the part of tickets that are claimed, by whether their
    clients mark repeats; `level` that of the first ticket."""

    tickets: list[Ticket] = field(default_factory=list)
    rows: int = 0
    level: int = 0
    claimed: dict[bool, float] = field(default_factory=lambda: {False: 1.0, True: 1.0})
    sums: dict[bool, Rows] = field(default_factory=lambda: {False: Rows(), True: Rows()})
    listed: list[tuple[int, int, Rows]] = field(default_factory=list)  # in the index: level, order, rows

    def count(self, ticket: Ticket, sign: int) -> None:
        self.rows += sign * ticket.rows
        self.sums[ticket.counts].add(_asked(ticket), sign)

    def learn(self, ticket: Ticket, claimed: float) -> None:
        self.claimed[ticket.counts] += NEWEST * (claimed - self.claimed[ticket.counts])

    def expected(self) -> Rows:
        """Return the rows expected of all its tickets."""
        rows = Rows()
        for counts, part in self.claimed.items():
            rows.add(self.sums[counts], part)
        return rows

    def part_earlier(self, order: int) -> float:
        """Return the part of the tickets that came before `order`. Each counts as the mean of all, as a line may have
        thousands."""
        return bisect_left(self.tickets, order, key=_order) / len(self.tickets) if self.tickets else 0.0

    def part_below(self, level: float, order: int) -> float:
        """Return the part of the tickets with a level below `level`, or the same and an order below `order`, as if all
        had the same number of rows."""
        count, each = len(self.tickets), self.rows / len(self.tickets)
        place = (level - self.level) / each
        before = min(count, max(0, math.ceil(place)))
        return (before + (before == place and before < count and self.tickets[before].order < order)) / count

    def entries(self) -> list[tuple[int, int, Rows]]:
        found, level = [], self.level
        for ticket in self.tickets:
            rows = Rows()
            rows.add(_asked(ticket), self.claimed[ticket.counts])
            found.append((level, ticket.order, rows))
            level += ticket.rows
        return found


class Index:
    """Index of rows by level and order."""

    def __init__(self) -> None:
        self._levels: list[int] = []
        self._orders: dict[int, list[int]] = {}
        self._sums: dict[int, Rows] = {}

    def add(self, level: int, order: int, rows: Rows) -> None:
        if level not in self._orders:
            insort(self._levels, level)
            self._orders[level], self._sums[level] = [], Rows()
        insort(self._orders[level], order)
        self._sums[level].add(rows)

    def remove(self, level: int, order: int, rows: Rows) -> None:
        orders = self._orders[level]
        del orders[bisect_left(orders, order)]
        self._sums[level].add(rows, -1)
        if not orders:
            self._levels.remove(level)
            del self._orders[level], self._sums[level]

    def before(self, level: float, order: int) -> Rows:
        """Return the rows of lower levels, and of those at `level` the part that came before `order`."""
        rows = Rows()
        for at in self._levels[: bisect_left(self._levels, level)]:
            rows.add(self._sums[at])
        if orders := self._orders.get(int(level)) if level == int(level) else None:
            rows.add(self._sums[int(level)], bisect_left(orders, order) / len(orders))
        return rows


class TicketsByTenant:
    """Tenants with tickets. `held` returns the number of a tenant's admitted rows."""

    def __init__(self, held: Callable[[str], int]) -> None:
        self._held = held
        self._tenants: dict[str, TenantTickets] = {}
        self._index = Index()
        self._many: dict[str, TenantTickets] = {}
        self._sizes: dict[int, dict[str, None]] = {}  # tenants by their number of tickets
        self._most = 0  # no tenant has more

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, ticket: Ticket) -> None:
        """Add `ticket` to the line."""
        record = self._tenants.setdefault(ticket.tenant, TenantTickets())
        self._unlist(ticket.tenant, record)
        insort(record.tickets, ticket, key=_order)
        record.count(ticket, 1)
        self._list(ticket.tenant, record)

    def remove(self, tenant: str, tickets: Iterable[Ticket], claimed: float | None = None) -> None:
        """Remove `tickets` of `tenant` from the line, `claimed` (1) or not (0); None if that says nothing."""
        record = self._tenants[tenant]
        self._unlist(tenant, record)
        for ticket in tickets:
            del record.tickets[bisect_left(record.tickets, ticket.order, key=_order)]
            record.count(ticket, -1)
            if claimed is not None:
                record.learn(ticket, claimed)
        self._list(tenant, record)

    def claimed_late(self, ticket: Ticket) -> None:
        """Record that `ticket`, which had left the line, was claimed after all."""
        record = self._tenants.get(ticket.tenant)
        if record is not None:
            self._unlist(ticket.tenant, record)
            record.learn(ticket, 1.0)
            self._list(ticket.tenant, record)

    def moved(self, tenant: str) -> None:
        """Update the level of a tenant whose number of admitted rows has changed."""
        record = self._tenants.get(tenant)
        if record is not None:
            self._unlist(tenant, record)
            self._list(tenant, record)

    def forget(self, tenant: str) -> None:
        """Forget a tenant that has no ticket in line."""
        record = self._tenants.get(tenant)
        if record is not None and not record.tickets:
            self._unlist(tenant, record)
            del self._tenants[tenant]

    def newest_of_most(self, tenant: str) -> Ticket | None:
        """Return the newest ticket of the tenant with the most, if that is more than `tenant` will have with one
        more."""
        while self._most and not self._sizes.get(self._most):
            self._most -= 1
        own = self._tenants.get(tenant)
        if self._most <= (0 if own is None else len(own.tickets)) + 1:
            return None
        return self._tenants[next(iter(self._sizes[self._most]))].tickets[-1]

    def weight(self, ticket: Ticket, usual_rows: float) -> float:
        """Return the rows that `ticket` is expected to claim."""
        rows = usual_rows if ticket.guessed else ticket.rows
        return rows * self._tenants[ticket.tenant].claimed[ticket.counts]

    def level(self, arrival: Arrival) -> float:
        own = self._tenants.get(arrival.tenant)
        return self._held(arrival.tenant) + (0.0 if own is None else own.rows * own.part_earlier(arrival.order))

    def rows_ahead(self, arrival: Arrival, usual_rows: float) -> float:
        """Return the rows that tickets ahead of `arrival` are expected to claim."""
        own, rows = self._tenants.get(arrival.tenant), Rows()
        if own is not None:
            rows.add(own.expected(), own.part_earlier(arrival.order))
        if len(self._tenants) > (own is not None):
            self._add_others(rows, arrival, own)
        return max(0.0, rows.known + usual_rows * rows.guesses)

    def _add_others(self, rows: Rows, arrival: Arrival, own: TenantTickets | None) -> None:
        level, order = self.level(arrival), arrival.order
        listed = [] if own is None else own.listed
        for entry in listed:
            self._index.remove(*entry)
        rows.add(self._index.before(level, order))
        for entry in listed:
            self._index.add(*entry)
        for record in self._many.values():
            if record is not own:
                rows.add(record.expected(), record.part_below(level, order))

    def _list(self, tenant: str, record: TenantTickets) -> None:
        record.level, count = self._held(tenant), len(record.tickets)
        self._sizes.setdefault(count, {})[tenant] = None
        self._most = max(self._most, count)
        if count > FEW:
            self._many[tenant] = record
            return
        record.listed = record.entries()
        for entry in record.listed:
            self._index.add(*entry)

    def _unlist(self, tenant: str, record: TenantTickets) -> None:
        sizes = self._sizes.get(len(record.tickets), {})
        sizes.pop(tenant, None)
        if not sizes:
            self._sizes.pop(len(record.tickets), None)
        self._many.pop(tenant, None)
        for entry in record.listed:
            self._index.remove(*entry)
        record.listed = []


def _asked(ticket: Ticket) -> Rows:
    return Rows(guesses=1.0) if ticket.guessed else Rows(known=float(ticket.rows))


def _order(ticket: Ticket) -> int:
    return ticket.order
