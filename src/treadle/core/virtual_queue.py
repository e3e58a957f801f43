"""Virtual queue: the tickets of refused requests, in order.

Rules:

- A refused request gets a ticket: a random id, a place in arrival order and the time at which it is due. A client that
  returns (with the id, or with the same request) finds it again, and keeps its place in order if refused once more.
- Within a tenant, tickets are ordered by arrival. Between tenants, the level of a ticket counts: the admitted rows of
  its tenant plus those of the tenant's earlier tickets. Lower levels go first, so that all tenants advance alike.
- A ticket that is not claimed within its grace no longer holds a place. It is kept for LATE_S more, so that a late
  client keeps its order.
- Tickets count by the part of their tenant's tickets that are claimed: requests that never return hold nothing.
- The table is bounded. When it is full, a tenant with fewer tickets takes the newest of the tenant with the most.
- A refusal costs no more with thousands of tickets: `tenant_tickets` counts those ahead by an index.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from .tenant_tickets import TicketsByTenant
from .tickets import NEWCOMER as NEWCOMER
from .tickets import Arrival as Arrival
from .tickets import Ticket as Ticket

MOST_TICKETS = 4096
GRACE_S = 1.5  # past the time told: `Retry-After` is rounded up to whole seconds, and the request has to travel
GRACE = 0.1  # the same as a part of the time since its first refusal
LONGEST_GRACE_S = 6.0
LATE_S = 60.0
EARLY_S = 0.25  # before the time told, where only the time tells a repeat from another client's first request
DOOR_S = 10.0  # between a request's headers and its body, while its ticket is not given to another
NEWEST_ROWS = 0.02  # share of the newest request in the mean number of rows of a request
MOST_SWEPT = 16  # tickets whose time is over that one refusal looks after
MOST_ALIKE = 256  # tickets of the same request that are compared with one that comes


class VirtualQueue:
    """All tickets. `held` returns the number of a tenant's admitted rows; `new_id` returns unguessable ticket ids."""

    def __init__(self, held: Callable[[str], int], new_id: Callable[[], str]) -> None:
        self._held = held
        self._new_id = new_id
        self._tenants = TicketsByTenant(held)
        self._orders = 0
        self._tickets: dict[str, Ticket] = {}
        self._alike: dict[tuple[int, int], dict[Ticket, None]] = {}  # by fingerprint and connection, and 0 for any
        self._lapsed: dict[Ticket, None] = {}
        self._dues: list[tuple[float, int, Ticket]] = []
        self._ends: list[tuple[float, int, Ticket]] = []  # ascending: when each ticket is looked at again
        self._usual_rows = 1.0
        self.kept = self.lapsed = 0

    def __len__(self) -> int:
        """Number of tickets that hold a place in line."""
        return len(self._dues)

    def saw(self, arrival: Arrival, rows: int) -> None:
        """Record that `arrival` asks for `rows` rows."""
        if arrival.ticket is None or arrival.ticket.guessed:
            self._usual_rows += NEWEST_ROWS * (rows - self._usual_rows)

    def moved(self, tenant: str) -> None:
        """Update the level of `tenant`, whose number of admitted rows has changed."""
        self._tenants.moved(tenant)

    # Who comes -----------------------------------------------------------------------------------------------------

    def recognise(self, arrival: Arrival, now: float) -> None:
        """Find the ticket of `arrival`, if it has one, and take over its order."""
        if arrival.ticket is None or arrival.ticket.id not in self._tickets:
            arrival.order = NEWCOMER
            arrival.ticket = self._named(arrival) or self._like(arrival, now)
        if arrival.ticket is not None:
            arrival.ticket.door = now
            arrival.order, arrival.since = arrival.ticket.order, arrival.ticket.since

    def _named(self, arrival: Arrival) -> Ticket | None:
        ticket = self._tickets.get(arrival.ticket_id)
        return ticket if ticket is not None and ticket.tenant == arrival.tenant else None

    def _like(self, arrival: Arrival, now: float) -> Ticket | None:
        """Return the likeliest ticket of the same request, on the same connection if there is one. If neither client
        nor connection tells a repeat from another client's first request, time has to."""
        if arrival.repeat is False or not arrival.fingerprint:
            return None
        if arrival.via and (same := self._waiting(arrival, arrival.via, now)):
            return _most_likely(same, now)
        found = self._waiting(arrival, 0, now)
        if arrival.repeat is None:
            found = [ticket for ticket in found if ticket.back <= now + EARLY_S]
        return _most_likely(found, now)

    def _waiting(self, arrival: Arrival, via: int, now: float) -> list[Ticket]:
        """Return tickets of the same request that no client is using now, the first issued first."""
        alike = (
            ticket
            for ticket in self._alike.get((arrival.fingerprint, via), ())
            if ticket.tenant == arrival.tenant and now - ticket.door > DOOR_S
        )
        return list(islice(alike, MOST_ALIKE))

    def admit(self, arrival: Arrival, now: float) -> None:
        """Use up the ticket of `arrival`, which is admitted."""
        ticket, arrival.ticket = arrival.ticket, None
        if ticket is not None and ticket.id in self._tickets:  # else the one of who was displaced for it took its room
            self._claim(ticket)
            self.kept += now <= ticket.until
            self._forget(ticket)
        if arrival.order == NEWCOMER:
            arrival.order = self._next_order()

    def _claim(self, ticket: Ticket) -> None:
        if ticket.in_line:
            self._leave_line([ticket], 1.0)
        else:
            self._tenants.claimed_late(ticket)

    # Who is refused ------------------------------------------------------------------------------------------------

    def place(self, arrival: Arrival, rows: int | None, tokens: int, now: float) -> Ticket | None:
        """Return the ticket of a refused `arrival` for `rows` rows (None: not known), out of line until `promise`; None
        if the table has no room for it."""
        ticket = arrival.ticket
        if ticket is not None and ticket.id in self._tickets:
            if ticket.in_line:
                self._leave_line([ticket], 1.0)
        elif (ticket := self._issue(arrival, now)) is None:
            return None
        ticket.rows, ticket.guessed = (1, True) if rows is None else (rows, False)
        ticket.tokens = tokens
        if ticket.via != arrival.via:
            if ticket.via:
                self._unlist(ticket, ticket.via)
            ticket.via = arrival.via
            if ticket.via:
                self._list(ticket, ticket.via)
        ticket.door = float("-inf")
        return ticket

    def promise(self, ticket: Ticket, *, due: float, back: float, now: float) -> None:
        """Put `ticket` into line: its client is to return at `back`."""
        ticket.due, ticket.back, ticket.turn, ticket.told = due, back, back, now
        ticket.until = back + min(GRACE_S + GRACE * (back - ticket.since), LONGEST_GRACE_S)
        self._tenants.add(ticket)
        insort(self._dues, (ticket.due, ticket.order, ticket))
        ticket.in_line = True
        self._lapsed.pop(ticket, None)
        self._look_at(ticket, ticket.until)

    def _issue(self, arrival: Arrival, now: float) -> Ticket | None:
        if len(self._tickets) >= MOST_TICKETS and not self._make_room(arrival.tenant):
            return None
        if arrival.order == NEWCOMER or arrival.ticket is not None:  # another request claimed its ticket, and the order
            arrival.order = self._next_order()
        if arrival.since is None:
            arrival.since = now
        counts = arrival.repeat is not None
        ticket = Ticket(self._new_id(), arrival.order, arrival.tenant, arrival.fingerprint, counts, since=arrival.since)
        self._tickets[ticket.id] = ticket
        self._list(ticket, 0)
        arrival.ticket = ticket
        return ticket

    def _make_room(self, tenant: str) -> bool:
        """Drop the ticket that lapsed first, else the newest of the tenant with the most, if that leaves it no fewer
        than `tenant` will have. Return whether one was dropped."""
        dropped = next(iter(self._lapsed), None) or self._tenants.newest_of_most(tenant)
        if dropped is not None:
            self._forget(dropped)
        return dropped is not None

    def _list(self, ticket: Ticket, via: int) -> None:
        self._alike.setdefault((ticket.fingerprint, via), {})[ticket] = None

    def _unlist(self, ticket: Ticket, via: int) -> None:
        alike = self._alike[ticket.fingerprint, via]
        del alike[ticket]
        if not alike:
            del self._alike[ticket.fingerprint, via]

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    # Whose turn it is ----------------------------------------------------------------------------------------------

    def rows_ahead(self, arrival: Arrival) -> float:
        """Return the rows that tickets ahead of `arrival` are expected to claim."""
        return self._tenants.rows_ahead(arrival, self._usual_rows)

    def needs(self, arrival: Arrival, until: float, now: float = 0.0) -> Iterator[tuple[float, float, Ticket]]:
        """Yield the tickets ahead of `arrival` that are due by `until`, the earliest first: the time, the rows that
        they are expected to claim, and the ticket."""
        tenants, usual = self._tenants, self._usual_rows
        level = tenants.level(arrival) if len(tenants) > 1 else 0.0
        reached: dict[str, int] = {}
        for due, order, ticket in self._dues:
            if due > until:
                return
            if ticket.until <= now:
                continue
            name = ticket.tenant
            if name != arrival.tenant:
                at = reached.setdefault(name, self._held(name))
                reached[name] += ticket.rows
                if (at, order) >= (level, arrival.order):
                    continue
            elif order >= arrival.order:
                continue
            yield due, tenants.weight(ticket, usual), ticket

    # Who does not come ---------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Take tickets whose grace is over out of line, and drop older ones: MOST_SWEPT at a time, as thousands may end
        together."""
        count = min(MOST_SWEPT, bisect_right(self._ends, (now, NEWCOMER)))
        over = [ticket for *_, ticket in self._ends[:count]]
        lapsed: dict[str, list[Ticket]] = {}
        for ticket in over:
            if ticket.in_line:
                lapsed.setdefault(ticket.tenant, []).append(ticket)
            else:
                self._forget(ticket)
        for tickets in lapsed.values():
            self._lapse(tickets)

    def statistics(self, now: float) -> dict[str, int]:
        """Return the numbers of open, kept and lapsed tickets. Those whose time is over count as lapsed before `sweep`
        gets to them."""
        ended = self._ends[: bisect_right(self._ends, (now, NEWCOMER))]
        over = sum(ticket.in_line for *_, ticket in ended)
        return {"open": len(self) - over, "kept": self.kept, "lapsed": self.lapsed + over}

    def _lapse(self, tickets: list[Ticket]) -> None:
        """Record that `tickets`, all of one tenant, were not claimed."""
        self._leave_line(tickets, 0.0)
        self.lapsed += len(tickets)
        for ticket in tickets:
            self._lapsed[ticket] = None
            self._look_at(ticket, ticket.until + LATE_S)

    def hold(self) -> None:
        """Keep present tickets from lapsing until `shift`, while the engine is away. Tickets issued from now on name
        the time of its return, and lapse as usual."""
        for ticket in self._tickets.values():
            if ticket.in_line:
                self._look_at(ticket, math.inf)

    def shift(self, since: float, now: float) -> None:
        """Move tickets from before the engine's absence by its length. Tickets issued meanwhile are due now at the
        earliest."""
        for ticket in self._tickets.values():
            if not ticket.in_line:
                continue
            if ticket.told <= since:
                ticket.due += now - since
                ticket.turn += now - since
                ticket.until += now - since
            else:
                ticket.due, ticket.until = max(ticket.due, now), max(ticket.until, now + GRACE_S)
            self._look_at(ticket, ticket.until)
        self._dues = sorted((ticket.due, ticket.order, ticket) for *_, ticket in self._dues)

    def _look_at(self, ticket: Ticket, when: float | None) -> None:
        if ticket.looked_at is not None:
            del self._ends[bisect_left(self._ends, (ticket.looked_at, ticket.order))]
        ticket.looked_at = when
        if when is not None:
            insort(self._ends, (when, ticket.order, ticket))

    def _leave_line(self, tickets: list[Ticket], claimed: float | None = None) -> None:
        """Take `tickets`, all of one tenant, out of line."""
        for ticket in tickets:
            ticket.in_line = False
            del self._dues[bisect_left(self._dues, (ticket.due, ticket.order))]
        self._tenants.remove(tickets[0].tenant, tickets, claimed)

    def _forget(self, ticket: Ticket) -> None:
        if ticket.in_line:
            self._leave_line([ticket])
        self._look_at(ticket, None)
        self._lapsed.pop(ticket, None)
        del self._tickets[ticket.id]
        for via in {0, ticket.via}:
            self._unlist(ticket, via)
        self._tenants.forget(ticket.tenant)


def _most_likely(tickets: Sequence[Ticket], now: float) -> Ticket | None:
    """Return the likeliest of `tickets` of equal requests for a client that returns now. Clients return on time or
    somewhat later: it is the due ticket with the earliest time, or the nearest one if none is due. Taking the nearest
    in any case would now and then take the ticket of a client still to come."""
    due = [ticket for ticket in tickets if ticket.back <= now + EARLY_S and now <= ticket.until]
    if due:
        return min(due, key=lambda ticket: (ticket.back, ticket.order))
    return min(tickets, key=lambda ticket: (abs(now - ticket.back), ticket.order), default=None)
