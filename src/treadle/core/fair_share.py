"""Fair shares of the places inside: rows by tenant (an API key, or a peer's address), and who gives way to whom.

While demand exceeds room, each tenant may hold an equal part. A tenant alone may hold everything. A newcomer of a
tenant that holds less displaces the newest waiting leases of the tenant that holds the most; rows that run are never
displaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .forecast import Lease


@dataclass(slots=True, eq=False)
class _TenantShare:
    rows: int = 0
    leases: dict[Lease, None] = field(default_factory=dict)  # in the order in which they came

    @property
    def running(self) -> int:
        return sum(len(lease.started) for lease in self.leases)


class FairShares:
    """Rows inside, by tenant. Tenants without any are not known here, so there are never more than places."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantShare] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def held(self, tenant: str) -> int:
        """The rows that `tenant` has inside, running and waiting."""
        share = self._tenants.get(tenant)
        return 0 if share is None else share.rows

    def enter(self, lease: Lease) -> None:
        share = self._tenants.setdefault(lease.arrival.tenant, _TenantShare())
        share.rows += lease.rows
        share.leases[lease] = None

    def leave(self, lease: Lease) -> None:
        """A row of `lease` has ended."""
        if lease.displaced:
            return
        self._tenants[lease.arrival.tenant].rows -= 1
        if not lease.rows:
            self._drop(lease)

    def waiting_ahead(self, tenant: str, waiting: int) -> int:
        """Of `waiting` rows inside, those that get a slot before a new row of `tenant`: its own, and of each other
        tenant as many as bring that one to the same number of rows."""
        own = self._tenants.get(tenant)
        if own is not None and len(self._tenants) == 1:
            return waiting
        level, ahead = (0, 0) if own is None else (own.rows, own.rows - own.running)
        for share in self._tenants.values():
            if share is not own:
                running = share.running
                ahead += min(max(0, level + 1 - running), share.rows - running)
        return min(ahead, waiting)

    def give_way(self, tenant: str, rows: int, missing: int) -> list[Lease]:
        """The leases to displace so that `rows` rows of `tenant` find the `missing` places: the newest that wait, of
        the tenants that hold the most, as long as those hold no less than `tenant` afterwards. Empty where that does
        not free enough."""
        level = self.held(tenant) + rows
        counts = {name: share.rows for name, share in self._tenants.items() if name != tenant}
        candidates = {name: self._waiting(name) for name in counts}
        chosen: list[Lease] = []
        while missing > 0:
            able = [name for name, found in candidates.items() if found and counts[name] - found[-1].rows >= level]
            if not able:
                return []
            richest = max(able, key=lambda name: counts[name])
            lease = candidates[richest].pop()
            counts[richest] -= lease.rows
            missing -= lease.rows
            chosen.append(lease)
        return chosen

    def displace(self, lease: Lease) -> None:
        """`lease` has to leave: from now on it counts for nobody."""
        share = self._tenants[lease.arrival.tenant]
        share.rows -= lease.rows
        lease.displaced = True
        self._drop(lease)

    def _waiting(self, tenant: str) -> list[Lease]:
        return [lease for lease in self._tenants[tenant].leases if not lease.began and lease.give_way is not None]

    def _drop(self, lease: Lease) -> None:
        share = self._tenants[lease.arrival.tenant]
        del share.leases[lease]
        if not share.leases:
            del self._tenants[lease.arrival.tenant]
