"""Tickets of requests that were refused and told when to come back: the line outside of the gate.

Rules:

- A refused request gets a ticket: a random id, its place in arrival order and the time at which it is due. Who comes
  back (with the ticket's id, or as the same request) finds it again, and keeps its place in order if refused once more.
- Within a sharer, tickets are ordered by arrival. Between sharers, a ticket's level counts: the rows that its sharer
  has inside plus those of the sharer's earlier tickets. The lower level goes first, so that all sharers advance alike.
- A ticket that is not claimed within its grace no longer holds a place. It is remembered for LATE_S more, so that who
  comes late keeps its order.
- Tickets count by the part of their sharer's tickets that are claimed: requests that never come back hold nothing.
- The table is bounded. When full, the sharer with the most tickets loses its newest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MOST_TICKETS = 4096
GRACE_S = 1.5  # past the time told: `Retry-After` is rounded up to whole seconds, and the request has to travel
GRACE = 0.05  # the same as a part of the time told
LATE_S = 60.0
EARLY_S = 0.25  # before the time told, where only the time tells a repeat from another client's first request
DOOR_S = 10.0  # between a request's headers and its body, while its ticket is not given to another
NEWEST = 0.1  # weight of each new observation in the part of tickets that are claimed
NEWEST_ROWS = 0.02  # the same in the mean number of rows of a request
NEWCOMER = 2**62


@dataclass(slots=True, eq=False)
class Ticket:
    """A refused request's place in line. `due` is when its place is expected, `back` when its client was told to come,
    at most as late, `since` when it was first refused; all in seconds of the gate's clock. `via` is the connection that
    it came on last."""

    id: str
    order: int
    sharer: str
    fingerprint: int
    counts: bool  # the client says of each request whether it is a repeat
    rows: int = 1
    guessed: bool = True  # its body is not read yet, so that its rows are not known
    tokens: int = 0
    via: int = 0
    since: float = 0.0
    due: float = 0.0
    back: float = 0.0
    until: float = 0.0
    in_line: bool = False
    door: float = float("-inf")


@dataclass(slots=True, eq=False)
class Arrival:
    """One attempt to get in. `sharer` is whose share it counts against, `ticket_id` the ticket that it names, if any,
    and `fingerprint` a hash that the same request has again (0: none). `repeat`: whether it is a client's second
    attempt or later, None where the client does not say. `via` is a hash of its connection (0: unknown). `order` is its
    place in arrival order once it has one, `since` when it was first refused, in seconds."""

    sharer: str = ""
    fingerprint: int = 0
    ticket_id: str = ""
    repeat: bool | None = None
    via: int = 0
    ticket: Ticket | None = None
    order: int = NEWCOMER
    since: float | None = None


@dataclass(slots=True, eq=False)
class _Party:
    """One sharer's tickets in line, in arrival order; `claimed` by whether their clients say what is a repeat."""

    tickets: list[Ticket] = field(default_factory=list)
    rows: int = 0
    claimed: dict[bool, float] = field(default_factory=lambda: {False: 1.0, True: 1.0})
    rows_of: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    guesses: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})  # tickets whose rows are not known

    def count(self, ticket: Ticket, sign: int) -> None:
        self.rows += sign * ticket.rows
        if ticket.guessed:
            self.guesses[ticket.counts] += sign
        else:
            self.rows_of[ticket.counts] += sign * ticket.rows

    def weight(self, ticket: Ticket, usual_rows: float) -> float:
        return (usual_rows if ticket.guessed else ticket.rows) * self.claimed[ticket.counts]

    def weighted(self, usual_rows: float) -> float:
        return sum(
            part * (self.rows_of[counts] + usual_rows * self.guesses[counts]) for counts, part in self.claimed.items()
        )


class Line:
    """All tickets. `held` says how many rows a sharer has inside; `new_id` makes unguessable ticket ids."""

    def __init__(self, held: Callable[[str], int], new_id: Callable[[], str]) -> None:
        self._held = held
        self._new_id = new_id
        self._orders = 0
        self._tickets: dict[str, Ticket] = {}
        self._alike: dict[int, dict[Ticket, None]] = {}
        self._parties: dict[str, _Party] = {}
        self._dues: list[tuple[float, int, Ticket]] = []
        self._ends: list[tuple[float, int, Ticket]] = []  # a heap: when each ticket is looked at again
        self._usual_rows = 1.0
        self.kept = self.lapsed = 0

    def __len__(self) -> int:
        """Tickets that hold a place in line."""
        return len(self._dues)

    def saw(self, arrival: Arrival, rows: int) -> None:
        """`arrival` turned out to ask for `rows` rows."""
        if arrival.ticket is None or arrival.ticket.guessed:
            self._usual_rows += NEWEST_ROWS * (rows - self._usual_rows)

    # Who comes -----------------------------------------------------------------------------------------------------

    def recognise(self, arrival: Arrival, now: float) -> None:
        """Find the ticket of `arrival`, if it has one; its order is the arrival's from then on."""
        if arrival.ticket is None or arrival.ticket.id not in self._tickets:
            arrival.order = NEWCOMER
            arrival.ticket = self._named(arrival) or self._like(arrival, now)
        if arrival.ticket is not None:
            arrival.ticket.door = now
            arrival.order, arrival.since = arrival.ticket.order, arrival.ticket.since

    def _named(self, arrival: Arrival) -> Ticket | None:
        ticket = self._tickets.get(arrival.ticket_id)
        return ticket if ticket is not None and ticket.sharer == arrival.sharer else None

    def _like(self, arrival: Arrival, now: float) -> Ticket | None:
        """The ticket of the same request, of several the one that came on the same connection, else the earliest of
        those that are due. Where neither the client nor the connection tells a repeat from another client's first
        request, time has to."""
        if arrival.repeat is False or not arrival.fingerprint:
            return None
        found = [
            ticket
            for ticket in self._alike.get(arrival.fingerprint, ())
            if ticket.sharer == arrival.sharer and now - ticket.door > DOOR_S
        ]
        same = [ticket for ticket in found if ticket.via and ticket.via == arrival.via]
        if not same and arrival.repeat is None:
            found = [ticket for ticket in found if ticket.back <= now + EARLY_S]
        return min(same or found, key=lambda ticket: (ticket.back > now + EARLY_S, ticket.order), default=None)

    def admit(self, arrival: Arrival, now: float) -> None:
        """`arrival` is inside: its ticket is used up."""
        if arrival.ticket is not None:
            self._claim(arrival.ticket, now)
            self._forget(arrival.ticket)
            arrival.ticket = None
        if arrival.order == NEWCOMER:
            arrival.order = self._next_order()

    def _claim(self, ticket: Ticket, now: float) -> None:
        self._learn(ticket, 1.0)
        self.kept += now <= ticket.until

    # Who is refused ------------------------------------------------------------------------------------------------

    def place(self, arrival: Arrival, rows: int | None, tokens: int, now: float) -> Ticket | None:
        """The ticket of a refused `arrival` for `rows` rows (None: not known), out of line until `promise`; None where
        the table has no room for it."""
        ticket = arrival.ticket
        if ticket is not None and ticket.id in self._tickets:
            if ticket.in_line:
                self._learn(ticket, 1.0)
                self._leave_line(ticket)
        elif (ticket := self._issue(arrival, now)) is None:
            return None
        ticket.rows, ticket.guessed = (1, True) if rows is None else (rows, False)
        ticket.tokens, ticket.via = tokens, arrival.via
        ticket.door = float("-inf")
        return ticket

    def promise(self, ticket: Ticket, *, due: float, back: float, now: float) -> None:
        """Put `ticket` into line: its client was told to come at `back`."""
        ticket.due, ticket.back = due, back
        ticket.until = back + GRACE_S + GRACE * (back - now)
        party = self._parties.setdefault(ticket.sharer, _Party())
        insort(party.tickets, ticket, key=_order)
        party.count(ticket, 1)
        insort(self._dues, (ticket.due, ticket.order, ticket))
        ticket.in_line = True
        heapq.heappush(self._ends, (ticket.until, ticket.order, ticket))

    def _issue(self, arrival: Arrival, now: float) -> Ticket | None:
        if len(self._tickets) >= MOST_TICKETS and not self._make_room(arrival.sharer):
            return None
        if arrival.order == NEWCOMER:
            arrival.order = self._next_order()
        if arrival.since is None:
            arrival.since = now
        counts = arrival.repeat is not None
        ticket = Ticket(self._new_id(), arrival.order, arrival.sharer, arrival.fingerprint, counts, since=arrival.since)
        self._tickets[ticket.id] = ticket
        self._alike.setdefault(ticket.fingerprint, {})[ticket] = None
        arrival.ticket = ticket
        return ticket

    def _make_room(self, sharer: str) -> bool:
        """Drop the oldest ticket that holds no place any more, else the newest of the sharer with the most, unless that
        is `sharer`."""
        lapsed = next((ticket for ticket in self._tickets.values() if not ticket.in_line), None)
        if lapsed is not None:
            self._forget(lapsed)
            return True
        name, most = max(self._parties.items(), key=lambda item: len(item[1].tickets))
        if name != sharer:
            self._forget(most.tickets[-1])
        return name != sharer

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    # Whose turn it is ----------------------------------------------------------------------------------------------

    def rows_ahead(self, arrival: Arrival) -> float:
        """Rows that tickets ahead of `arrival` are expected to claim."""
        own, usual = self._parties.get(arrival.sharer), self._usual_rows
        rows = 0.0 if own is None else own.weighted(usual) * self._part_earlier(own, arrival.order)
        if len(self._parties) > 1:
            level = self._level(arrival)
            for name, party in self._parties.items():
                if party is not own:
                    rows += sum(
                        party.weight(ticket, usual) for ticket in self._below(name, party, level, arrival.order)
                    )
        return rows

    def _part_earlier(self, party: _Party, order: int) -> float:
        """The part of the party's tickets that came before `order`. Each counts as the mean of all, as a line may be
        thousands of tickets long."""
        if not party.tickets:
            return 0.0
        return bisect_left(party.tickets, order, key=_order) / len(party.tickets)

    def _level(self, arrival: Arrival) -> float:
        own = self._parties.get(arrival.sharer)
        rows = 0.0 if own is None else own.rows * self._part_earlier(own, arrival.order)
        return self._held(arrival.sharer) + rows

    def _below(self, name: str, party: _Party, level: float, order: int) -> Iterator[Ticket]:
        """The tickets of another sharer whose level is below `level`; of the same level, the earlier."""
        reached = self._held(name)
        for ticket in party.tickets:
            if (reached, ticket.order) >= (level, order):
                return
            reached += ticket.rows
            yield ticket

    def needs(self, arrival: Arrival, until: float) -> Iterator[tuple[float, float, Ticket]]:
        """Of the tickets ahead of `arrival` that are due until then: when, how many rows they are expected to claim,
        and the ticket; the earliest first."""
        own = self._parties.get(arrival.sharer)
        level = self._level(arrival) if len(self._parties) > 1 else 0.0
        reached: dict[str, int] = {}
        for due, order, ticket in self._dues:
            if due > until:
                return
            name = ticket.sharer
            party = self._parties[name]
            if party is not own:
                at = reached.setdefault(name, self._held(name))
                reached[name] += ticket.rows
                if (at, order) >= (level, arrival.order):
                    continue
            elif order >= arrival.order:
                continue
            yield due, party.weight(ticket, self._usual_rows), ticket

    # Who does not come ---------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Take tickets out of line whose grace is over, and forget those that are older still."""
        while self._ends and self._ends[0][0] <= now:
            _, order, ticket = heapq.heappop(self._ends)
            if ticket.id not in self._tickets:
                continue
            if ticket.in_line and ticket.until <= now:
                self._learn(ticket, 0.0)
                self._leave_line(ticket)
                self.lapsed += 1
                heapq.heappush(self._ends, (ticket.until + LATE_S, order, ticket))
            elif not ticket.in_line and ticket.until + LATE_S <= now:
                self._forget(ticket)

    def _learn(self, ticket: Ticket, claimed: float) -> None:
        party = self._parties.get(ticket.sharer)
        if party is not None:
            party.claimed[ticket.counts] += NEWEST * (claimed - party.claimed[ticket.counts])

    def _leave_line(self, ticket: Ticket) -> None:
        ticket.in_line = False
        del self._dues[bisect_left(self._dues, (ticket.due, ticket.order))]
        party = self._parties[ticket.sharer]
        del party.tickets[bisect_left(party.tickets, ticket.order, key=_order)]
        party.count(ticket, -1)

    def _forget(self, ticket: Ticket) -> None:
        if ticket.in_line:
            self._leave_line(ticket)
        del self._tickets[ticket.id]
        alike = self._alike[ticket.fingerprint]
        del alike[ticket]
        if not alike:
            del self._alike[ticket.fingerprint]
        party = self._parties.get(ticket.sharer)
        if party is not None and not party.tickets:
            del self._parties[ticket.sharer]


def _order(ticket: Ticket) -> int:
    return ticket.order
