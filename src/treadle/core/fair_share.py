"""Fair shares of the places inside: rows by sharer (an API key, or a peer's address), and who gives way to whom.

While demand exceeds room, each sharer may hold an equal part. A sharer alone may hold everything. A newcomer of a
sharer that holds less displaces the newest waiting visits of the sharer that holds the most; rows that run are never
displaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .forecast import Lease


@dataclass(slots=True, eq=False)
class _Party:
    rows: int = 0
    visits: dict[Lease, None] = field(default_factory=dict)  # in the order in which they came

    @property
    def running(self) -> int:
        return sum(len(visit.started) for visit in self.visits)


class Shares:
    """Rows inside, by sharer. Sharers without any are not known here, so there are never more than places."""

    def __init__(self) -> None:
        self._parties: dict[str, _Party] = {}

    def __len__(self) -> int:
        return len(self._parties)

    def held(self, sharer: str) -> int:
        """The rows that `sharer` has inside, running and waiting."""
        party = self._parties.get(sharer)
        return 0 if party is None else party.rows

    def enter(self, visit: Lease) -> None:
        party = self._parties.setdefault(visit.arrival.sharer, _Party())
        party.rows += visit.rows
        party.visits[visit] = None

    def leave(self, visit: Lease) -> None:
        """A row of `visit` has ended."""
        if visit.displaced:
            return
        self._parties[visit.arrival.sharer].rows -= 1
        if not visit.rows:
            self._drop(visit)

    def waiting_ahead(self, sharer: str, waiting: int) -> int:
        """Of `waiting` rows inside, those that get a slot before a new row of `sharer`: its own, and of each other
        sharer as many as bring that one to the same number of rows."""
        own = self._parties.get(sharer)
        if own is not None and len(self._parties) == 1:
            return waiting
        level, ahead = (0, 0) if own is None else (own.rows, own.rows - own.running)
        for party in self._parties.values():
            if party is not own:
                running = party.running
                ahead += min(max(0, level + 1 - running), party.rows - running)
        return min(ahead, waiting)

    def give_way(self, sharer: str, rows: int, missing: int) -> list[Lease]:
        """The visits to displace so that `rows` rows of `sharer` find the `missing` places: the newest that wait, of
        the sharers that hold the most, as long as those hold no less than `sharer` afterwards. Empty where that does
        not free enough."""
        level = self.held(sharer) + rows
        counts = {name: party.rows for name, party in self._parties.items() if name != sharer}
        candidates = {name: self._waiting(name) for name in counts}
        chosen: list[Lease] = []
        while missing > 0:
            able = [name for name, found in candidates.items() if found and counts[name] - found[-1].rows >= level]
            if not able:
                return []
            richest = max(able, key=lambda name: counts[name])
            visit = candidates[richest].pop()
            counts[richest] -= visit.rows
            missing -= visit.rows
            chosen.append(visit)
        return chosen

    def displace(self, visit: Lease) -> None:
        """`visit` has to leave: from now on it counts for nobody."""
        party = self._parties[visit.arrival.sharer]
        party.rows -= visit.rows
        visit.displaced = True
        self._drop(visit)

    def _waiting(self, sharer: str) -> list[Lease]:
        return [visit for visit in self._parties[sharer].visits if not visit.began and visit.give_way is not None]

    def _drop(self, visit: Lease) -> None:
        party = self._parties[visit.arrival.sharer]
        del party.visits[visit]
        if not party.visits:
            del self._parties[visit.arrival.sharer]
