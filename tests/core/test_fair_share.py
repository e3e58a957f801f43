"""Fair shares: of the gate's places, of the line, and of the scheduler's slots."""

from __future__ import annotations

import pytest

from tests.core.crowd import Client, Crowd
from treadle.core.fair_share import FairShares
from treadle.core.forecast import Lease
from treadle.core.gate import Gate, GateLimits
from treadle.core.messages import Submit
from treadle.core.queue import Queue
from treadle.core.sequence import Sequence
from treadle.core.virtual_queue import Arrival
from treadle.errors import Busy, EngineUnavailable, TreadleError


def gate(running: int = 2, waiting: int = 2) -> Gate:
    limits = GateLimits(running, waiting, 4.0)
    it = Gate(limits, EngineUnavailable("loading"))
    it.open_(limits)
    return it


class Leases:
    """Leases to one gate, and those of them that had to give way."""

    def __init__(self, it: Gate) -> None:
        self.gate = it
        self.displaced: list[tuple[Lease, TreadleError]] = []

    def enter(self, tenant: str, rows: int = 1, *, runs: bool = False, now: float = 0.0) -> Lease:
        lease = self.gate.admit(rows=rows, tokens=rows, now=now, service_s=10.0, arrival=Arrival(tenant))
        lease.give_way = lambda error: self.displaced.append((lease, error))
        if runs:
            self.gate.started(lease, 0.0, now)
        return lease


def test_a_newcomer_below_its_share_displaces_the_newest_that_waits_of_who_holds_the_most() -> None:
    """D16"""
    leases = Leases(it := gate())
    for _ in range(2):
        leases.enter("a", runs=True)
    leases.enter("a")
    newest = leases.enter("a")
    it.check_room(1.0, Arrival("b"))
    leases.enter("b", now=1.0)
    ((lease, error),) = leases.displaced
    assert lease is newest
    assert isinstance(error, Busy)
    assert error.retry_after_s is not None
    assert error.ticket
    assert it.rows == 5, "its row has not ended yet"
    assert it.statistics()["refused"] == {"displaced": 1}
    it.release(newest, "displaced", 1.1)
    assert it.rows == 4
    with pytest.raises(Busy):
        leases.enter("a", now=1.2)


def test_nobody_is_displaced_for_who_holds_as_much() -> None:
    leases = Leases(gate())
    for tenant in "aabb":
        leases.enter(tenant)
    for tenant in "ab":
        with pytest.raises(Busy):
            leases.enter(tenant)
    leases.enter("c")
    assert len(leases.displaced) == 1
    with pytest.raises(Busy):
        leases.enter("c")


def test_rows_that_run_are_never_displaced() -> None:
    leases = Leases(gate(running=2, waiting=0))
    for _ in range(2):
        leases.enter("a", runs=True)
    with pytest.raises(Busy):
        leases.enter("b")
    assert not leases.displaced


def test_several_rows_displace_as_many_or_none() -> None:
    leases = Leases(gate(running=2, waiting=4))
    for _ in range(6):
        leases.enter("a")
    leases.enter("b", rows=2)
    assert len(leases.displaced) == 2
    with pytest.raises(Busy):
        leases.enter("c", rows=3)
    assert len(leases.displaced) == 2


def test_one_tenant_alone_may_hold_everything() -> None:
    leases = Leases(it := gate())
    for _ in range(4):
        leases.enter("a")
    assert it.statistics()["sharers"] == 1


def test_waiting_rows_ahead_are_those_that_bring_others_to_the_same_number() -> None:
    it = FairShares()
    assert it.waiting_ahead("a", 0) == 0
    for _ in range(6):
        it.enter(Lease(1, 1, 0.0, arrival=Arrival("a")))
    assert it.waiting_ahead("a", 4) == 4
    assert it.waiting_ahead("b", 4) == 1, "a runs none yet"
    it.enter(Lease(1, 1, 0.0, arrival=Arrival("b")))
    assert it.waiting_ahead("b", 7) == 3
    assert it.waiting_ahead("b", 2) == 2


# The scheduler's queue


def row(order: int, tenant: str = "", priority: int = 0, group: str = "") -> Sequence:
    submit = Submit(id=str(order), prompt=(1,), max_tokens=1, tenant=tenant, priority=priority, group=group)
    return Sequence(request=submit, order=order, arrived=0.0)


def served(rows: list[Sequence], slots: int = 1) -> list[int]:
    """The orders of all rows as they get slots, each of which is given back by the oldest that runs."""
    it, running, orders = Queue(), [], []
    for each in rows:
        it.add(each)
        it.push(each)
    while (head := it.head(running)) is not None:
        if len(running) == slots:
            it.remove(running.pop(0))
            continue
        it.pop(head)
        running.append(head)
        orders.append(head.order)
    return orders


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    assert served([row(i) for i in range(6)], slots=2) == [0, 1, 2, 3, 4, 5]


def test_tenants_are_served_in_turn() -> None:
    rows = [*(row(i, "a") for i in range(4)), row(4, "b"), row(5, "c"), row(6, "b")]
    assert served(rows) == [0, 4, 5, 1, 6, 2, 3]
    assert served(rows, slots=2)[:3] == [0, 4, 5]


def test_priorities_go_before_shares_and_what_has_begun_before_all() -> None:
    assert served([row(0, "a"), row(1, "b", priority=1), row(2, "a"), row(3, "a", priority=-1)]) == [3, 0, 2, 1]
    group = [row(0, "a", group="g"), row(1, "b"), row(2, "a", group="g")]
    assert served(group, slots=3) == [0, 2, 1]


# Floods


@pytest.mark.untraced
@pytest.mark.parametrize("poll_s", [0.0, 0.05], ids=["obeys", "disobeys"])
@pytest.mark.parametrize("waiting", [None, 0, 16])
def test_a_flood_of_one_tenant_costs_another_about_one_service_time(poll_s: float, waiting: int | None) -> None:
    """D16: 0 of 7 in 30 s before."""

    def flood(at: float) -> Client:
        return Client(at=at, tenant="a", expected_s=2.0, certain=True, poll_s=poll_s)

    def after(client: Client, now: float) -> Client | None:
        return flood(now + 0.02) if client.tenant == "a" else None

    others = [Client(at=5.0 + 4.0 * i, tenant="b", expected_s=2.0, certain=True, attempts=3) for i in range(7)]
    crowd = Crowd([*(flood(0.01 * i) for i in range(100)), *others], running=4, waiting=waiting, after=after).run(40.0)
    assert all(client.began is not None and client.began - client.at <= 2.0 * 1.5 for client in others)
    assert crowd.goodput(0.0, 40.0) >= 0.7
