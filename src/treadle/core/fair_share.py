"""Fair shares: places by tenant (an API key, or a peer's address), and displacement.

When demand exceeds capacity, each tenant may hold an equal part; alone, it may hold everything. A request of a
tenant that holds less displaces the newest waiting leases of the tenant that holds the most. Running rows are never
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
    """Admitted rows by tenant. Tenants without rows are not stored, so there are never more than places."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantShare] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def held(self, tenant: str) -> int:
        """Return the number of admitted rows of `tenant`, running and waiting."""
        share = self._tenants.get(tenant)
        return 0 if share is None else share.rows

    def enter(self, lease: Lease) -> None:
        share = self._tenants.setdefault(lease.arrival.tenant, _TenantShare())
        share.rows += lease.rows
        share.leases[lease] = None

    def leave(self, lease: Lease) -> None:
        """Count out a row of `lease`, which has ended."""
        if lease.displaced:
            return
        self._tenants[lease.arrival.tenant].rows -= 1
        if not lease.rows:
            self._drop(lease)

    def waiting_ahead(self, tenant: str, waiting: int) -> int:
        """Return how many of `waiting` rows get a slot before a new row of `tenant`: its own, and of each other tenant
        those up to the same number of rows."""
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
        """Return the leases to displace so that `rows` rows of `tenant` find the `missing` places: the newest waiting
        ones of the tenants that hold the most, if those keep no less than `tenant` will have. Empty if that does not
        free enough."""
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
        """Mark `lease` as displaced. It no longer counts for its tenant."""
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
