"""Promises are kept: simulated crowds that come back when told find their places, each of them in a few requests."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tests.core.crowd import Client, Crowd
from treadle.core import virtual_queue as line_module
from treadle.core.admission_capacity import LONGEST_PROMISE_S, SPREAD
from treadle.core.gate import Gate, GateLimits
from treadle.core.refusals import Refusal
from treadle.core.virtual_queue import Arrival
from treadle.errors import Busy, EngineUnavailable, TreadleError

SDK_ATTEMPTS = 3  # of the official SDKs at their defaults: one, and two retries


def burst(count: int, *, service_s: float = 2.0, measured: float = 1.0, **fields: object) -> list[Client]:
    """Clients that come within a moment; `measured` is what the server expects of `service_s`."""
    return [
        Client(at=0.001 * i, service_s=service_s, expected_s=measured * service_s, certain=True, **fields)  # type: ignore[arg-type]
        for i in range(count)
    ]


@pytest.mark.parametrize("running", [4, 16])
@pytest.mark.parametrize("clients", [48, 160, 320])
@pytest.mark.parametrize("counts", [True, False], ids=["sdk", "plain"])
def test_who_obeys_is_served_within_three_requests(running: int, clients: int, counts: bool) -> None:
    """D12: median 2, at most what the SDKs send at their defaults; where the wait is no longer than they obey."""
    service_s = min(2.0, 50.0 * running / clients)
    crowd = Crowd(burst(clients, service_s=service_s, counts=counts), running=running).run()
    assert len(crowd.served) == clients
    assert statistics.median(crowd.sent()) <= 2
    assert max(crowd.sent()) <= SDK_ATTEMPTS
    assert crowd.kept() >= 0.9
    assert crowd.kept(first=True) >= 0.9
    assert crowd.gate.rows == 0


@pytest.mark.parametrize("measured", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("service_s", [1.0, 10.0])
def test_sdks_at_their_defaults_are_all_answered_at_three_times_the_slots(measured: float, service_s: float) -> None:
    """R2, D12: on a fresh server, also where the warm-up measured less or more than is true."""
    crowd = Crowd(burst(48, service_s=service_s, measured=measured, attempts=SDK_ATTEMPTS), running=16).run()
    assert not any(client.gave_up for client in crowd.clients)


@pytest.mark.parametrize("late_s", [0.0, 0.5])
@pytest.mark.parametrize("counts", [True, False], ids=["sdk", "plain"])
def test_clients_whose_requests_look_alike_do_not_take_each_others_places(counts: bool, late_s: float) -> None:
    """As from one program with prompts of one length, on a new connection each time."""
    crowd = Crowd(burst(320, service_s=1.3, counts=counts, fingerprint=7, late_s=late_s), running=4).run()
    assert statistics.median(crowd.sent()) <= 2
    assert max(crowd.sent()) <= SDK_ATTEMPTS + 1
    assert sum(sent > SDK_ATTEMPTS for sent in crowd.sent()) <= 10
    assert crowd.kept() >= 0.9


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_are_late_after_a_long_wait_find_their_places(seed: int) -> None:
    """Busy machines of clients, or of the server."""
    crowd = Crowd(burst(320, service_s=1.7, measured=0.8, late_s=6.0), running=4, seed=seed).run()
    assert len(crowd.served) == 320
    assert max(crowd.sent()) <= SDK_ATTEMPTS + 2
    assert crowd.kept() >= 0.8


@pytest.mark.parametrize("clients", [48, 160, 320])
@pytest.mark.parametrize("service_s", [0.5, 1.0, 1.5, 2.0, 2.5])
def test_no_client_sends_more_than_promises_of_a_minute_take(clients: int, service_s: float) -> None:
    """The bound: a client that comes so late in line waits inside for `max_wait_s`, and before that for promises."""
    crowd = Crowd(burst(clients, service_s=service_s), running=4).run()
    begins = [max(0.0, (i - 3) * service_s / 4) for i in range(clients)]
    least = sorted(1 + max(0, math.ceil((at - crowd.max_wait_s) / LONGEST_PROMISE_S)) for at in begins)
    assert crowd.sent()[-1] <= least[-1]
    assert statistics.median(crowd.sent()) <= max(2, statistics.median(least))
    assert crowd.goodput(0, begins[-1]) >= 0.97


def test_waits_beyond_what_sdks_obey_are_confirmed_at_each_return() -> None:
    """Each return confirms the place: requests are bounded by the wait over the longest promise, and nobody starves."""
    crowd = Crowd(burst(160, service_s=10.0), running=4).run()
    assert len(crowd.served) == 160
    for client in crowd.served:
        assert client.began is not None
        assert client.sent <= 2 + (client.began - client.at) / ((1 - SPREAD) * LONGEST_PROMISE_S)
    late = [(client.began or 0.0) - 10.0 * i / 4 for i, client in enumerate(crowd.clients)]
    assert max(late) <= 2 * LONGEST_PROMISE_S, "nobody starves: two returns more than first come, first served"


@pytest.mark.parametrize(
    ("expected_s", "attempts", "part", "late_s"),
    [(10.0, 3, 0.9, 3.0), (4.0, 5, 0.7, 10.0)],
    ids=["as expected", "longer"],
)
@pytest.mark.parametrize("at", [1.0, 10.0])
@pytest.mark.parametrize("counts", [True, False], ids=["sdk", "plain"])
def test_promises_are_kept_over_an_outage(
    at: float, expected_s: float, attempts: int, part: float, late_s: float, counts: bool
) -> None:
    """Who comes back while the engine is away keeps its place, and is told when that will be."""
    outage_s = 10.0
    crowd = Crowd(burst(64, counts=counts), running=4, outage=(at, outage_s, expected_s)).run()
    assert len(crowd.served) == 64
    assert max(crowd.sent()) <= attempts
    told = [(told, client.entered - when) for client in crowd.served for when, told in client.told if when >= at]  # type: ignore[operator]
    assert sum(abs(told - true) <= 0.5 * true for told, true in told) >= part * len(told)
    began = [client.began or 0.0 for client in crowd.clients]
    assert max(when - (2.0 * i / 4 + outage_s) for i, when in enumerate(began)) <= late_s, "nobody is overtaken by many"
    assert crowd.goodput(0, max(began) - outage_s) >= 0.95
    assert crowd.gate.statistics()["promises"]["lapsed"] == 0


def test_requests_of_several_rows_do_not_starve_beside_singles() -> None:
    """D12: 1 of 101 before."""
    chance = random.Random(1)
    many = [Client(at=chance.uniform(0, 60), rows=4, expected_s=2.0, certain=True) for _ in range(10)]
    single = [Client(at=chance.uniform(0, 60), expected_s=2.0, certain=True) for _ in range(240)]
    crowd = Crowd([*many, *single], running=4).run()
    assert len(crowd.served) == 250
    last = max(client.began or 0.0 for client in crowd.clients)
    assert crowd.goodput(0, last) >= 0.95
    assert max(client.sent for client in many) <= 6
    waits = [(client.began or 0.0) - client.at for client in many]
    others = [(client.began or 0.0) - client.at for client in single]
    assert statistics.mean(waits) <= 1.3 * statistics.mean(others)


def test_requests_of_mixed_lengths_are_promised_what_comes_true() -> None:
    chance = random.Random(3)
    clients = [Client(at=0.001 * i, service_s=chance.choice((0.5, 1.0, 2.0, 8.0)), certain=True) for i in range(160)]
    for client in clients:
        client.expected_s = client.service_s
    crowd = Crowd(clients, running=16).run()
    assert crowd.kept() >= 0.9
    assert max(crowd.sent()) <= SDK_ATTEMPTS


@pytest.mark.parametrize("waiting", [None, 4])
def test_those_who_never_come_back_cost_no_goodput(waiting: int | None) -> None:
    """R2: places that are promised to requests that never return are not kept for long."""

    def after(client: Client, now: float) -> Client:
        return Client(at=now + 0.02, expected_s=2.0, certain=True, poll_s=0.2, fresh=True)

    clients = [Client(at=0.01 * i, expected_s=2.0, certain=True, poll_s=0.2, fresh=True) for i in range(40)]
    crowd = Crowd(clients, running=4, waiting=waiting, after=after).run(60.0)
    assert crowd.goodput(0.0, 60.0) >= 0.95


def test_ten_times_what_fits_keeps_the_slots_busy() -> None:
    """R2: an open loop of clients that obey."""
    chance, at = random.Random(1), 0.0
    clients = []
    while (at := at + chance.expovariate(10 * 4 / 2.0)) < 60:
        clients.append(Client(at=at, expected_s=2.0, certain=True))
    crowd = Crowd(clients, running=4).run(60.0)
    assert crowd.goodput(0.0, 60.0) >= 0.95
    assert crowd.kept() >= 0.9


@pytest.mark.parametrize("fresh", [False, True], ids=["alike", "fresh"])
@pytest.mark.parametrize("service_s", [0.1, 2.0])
@pytest.mark.parametrize(("running", "tokens"), [(1, 0), (13, 512)], ids=["rows", "tokens"])
def test_who_comes_back_before_the_time_told_keeps_no_server_idle(
    running: int, tokens: int, service_s: float, fresh: bool
) -> None:
    """R2: one such client can't be told from another's first request, so it leaves tickets that are of nobody. One of
    these comes back at once, again and again."""
    chance = random.Random(5)

    def client(now: float, poll_s: float) -> Client:
        return Client(
            at=now, service_s=service_s, tokens=chance.randint(300, 460), poll_s=poll_s, counts=False, fresh=fresh
        )

    clients = [client(0.01 * i, poll_s) for i, poll_s in enumerate([0.21, 0.27, 0.34, 0.4, 0.47, 0.55, 0.003])]
    crowd = Crowd(
        clients, running=running, waiting=0, tokens=tokens, after=lambda one, now: client(now + 0.02, one.poll_s)
    ).run(60.0)
    assert crowd.busy_s >= 0.4 * 60.0


# Parts


def gate(running: int = 1, waiting: int = 1, **more: object) -> Gate:
    limits = GateLimits(running, waiting, 4.0, **more)  # type: ignore[arg-type]
    it = Gate(limits, EngineUnavailable("loading"))
    it.open_(limits)
    return it


def refused(it: Gate, now: float, arrival: Arrival, *, rows: int = 1, tokens: int = 1) -> Busy:
    with pytest.raises(Busy) as refusal:
        it.admit(rows=rows, tokens=tokens, now=now, service_s=10.0, certain=True, arrival=arrival)
    return refusal.value


def full(it: Gate) -> None:
    for _ in range(it.limits.places):
        lease = it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True)
        if it.rows <= it.limits.running:
            it.started(lease, 0.0, 0.0)


def test_a_newcomer_does_not_get_the_place_that_was_promised() -> None:
    it = gate(running=1, waiting=0)
    lease = it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True)
    it.started(lease, 0.0, 0.0)
    promise = refused(it, 1.0, Arrival(fingerprint=1, repeat=False))
    assert promise.retry_after_s is not None
    assert promise.ticket
    it.release(lease, "stop", 9.9)
    newcomer = refused(it, 10.0, Arrival(fingerprint=2, repeat=False))
    assert "promised to requests that came earlier" in str(newcomer)
    it.admit(rows=1, tokens=1, now=1.0 + promise.retry_after_s, arrival=Arrival(ticket_id=promise.ticket))
    assert it.statistics()["refused"] == {"queue_full": 1, "promised": 1}
    assert it.statistics()["promises"] == {"open": 1, "kept": 1, "lapsed": 0}


def test_a_place_that_nobody_claims_goes_back_to_the_line() -> None:
    it = gate(running=1, waiting=0)
    lease = it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True)
    it.started(lease, 0.0, 0.0)
    refused(it, 1.0, Arrival(fingerprint=1, repeat=False))
    it.release(lease, "stop", 10.0)
    it.admit(rows=1, tokens=1, now=14.0, arrival=Arrival(fingerprint=2, repeat=False))
    assert it.statistics()["promises"] == {"open": 0, "kept": 0, "lapsed": 1}


def test_tickets_that_nobody_claims_count_as_lapsed_though_nobody_comes_any_more() -> None:
    it = gate(running=1, waiting=0)
    full(it)
    for client in range(1, 100):
        refused(it, 0.0, Arrival(fingerprint=client))
    assert it.statistics(1.0)["promises"] == {"open": 99, "kept": 0, "lapsed": 0}
    assert it.statistics(1000.0)["promises"] == {"open": 0, "kept": 0, "lapsed": 99}
    refused(it, 1000.0, Arrival(fingerprint=100))
    assert it.statistics(1000.0)["promises"] == {"open": 1, "kept": 0, "lapsed": 99}


def test_a_claimed_ticket_gives_its_order_to_nobody_else() -> None:
    """A lease is displaced while its prompt is tokenized, and an alike request claims its ticket before its client
    hears of it. Both are refused while the engine is away, and due at once when it is back."""
    it = gate(running=1, waiting=2, tokens=100)
    running = it.admit(rows=1, tokens=1, now=0.0, service_s=1.0, certain=True, arrival=Arrival("c"))
    it.started(running, 0.0, 0.0)
    it.admit(rows=1, tokens=1, now=0.0, arrival=Arrival("a", 1))
    displaced = it.admit(rows=1, tokens=1, now=0.0, arrival=Arrival("a", 2))
    told: list[TreadleError] = []
    displaced.give_way = told.append
    it.admit(rows=1, tokens=1, now=0.0, arrival=Arrival("b"))
    assert len(told) == 1
    it.release(running, "stop", 1.0)
    other = it.admit(rows=1, tokens=1, now=5.0, arrival=Arrival("a", 2))
    assert other.arrival.order == displaced.arrival.order
    it.close(EngineUnavailable("restarting"), back_s=lambda: 1.0, now=6.0)
    with pytest.raises(Busy, match="tokens"):
        it.resize(displaced, tokens=100, now=7.0)
    it.postpone(other, Refusal.WAIT_OVER, 7.0)
    it.open_(it.limits, 60.0)
    assert it.statistics(60.0)["promises"]["open"] == 2


def test_who_displaces_another_may_lose_its_own_ticket_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is full, and the ticket of who comes late is the first that gives way."""
    monkeypatch.setattr(line_module, "MOST_TICKETS", 1)
    it = gate(running=1, waiting=1)
    running = it.admit(rows=1, tokens=1, now=0.0, arrival=Arrival("a", 1))
    it.started(running, 0.0, 0.0)
    waiting = it.admit(rows=1, tokens=1, now=0.0, arrival=Arrival("a", 2))
    told: list[TreadleError] = []
    waiting.give_way = told.append
    it.close(EngineUnavailable("restarting"), back_s=lambda: 1.0, now=1.0)
    with pytest.raises(EngineUnavailable) as away:
        it.admit(rows=1, tokens=1, now=1.0, arrival=Arrival("b", 3))
    it.open_(it.limits, 2.0)
    it.check_room(30.0, Arrival("c"))  # its time is over by now
    lease = it.admit(rows=1, tokens=1, now=30.0, arrival=Arrival("b", 3, ticket_id=away.value.ticket))
    assert len(told) == 1
    for each in (running, waiting, lease):
        it.release(each, "stop", 31.0)
    assert it.rows == it.tokens == 0


def test_who_comes_when_told_may_wait_for_longer_and_beside_those_without_a_promise() -> None:
    it = gate(running=1, waiting=1, by_forecast=True)
    first = it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True)
    it.started(first, 0.0, 0.0)
    second = it.admit(rows=1, tokens=1, now=7.0, service_s=10.0, certain=True)
    promise = refused(it, 7.0, Arrival(fingerprint=1, repeat=False))
    assert promise.retry_after_s is not None
    it.release(first, "stop", 10.0)
    it.started(second, 3.0, 10.0)
    it.admit(rows=1, tokens=1, now=12.5, service_s=10.0, certain=True, arrival=Arrival(fingerprint=2, repeat=False))
    back = 7.0 + promise.retry_after_s
    lease = it.admit(rows=1, tokens=1, now=back, arrival=Arrival(fingerprint=1, repeat=True))
    assert lease.max_wait_s == pytest.approx(promise.retry_after_s)
    assert it.rows == 3


def test_who_comes_while_the_engine_is_away_is_told_when_it_is_back_and_gets_a_place_then() -> None:
    it = gate(running=2, waiting=0)
    started = it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True)
    it.started(started, 0.0, 0.0)
    it.close(EngineUnavailable("restarting"), back_s=lambda: 6.0, now=4.0)
    told = []
    for i in range(3):
        with pytest.raises(EngineUnavailable, match="restarting") as refusal:
            it.check_room(4.0, Arrival(fingerprint=i + 1, repeat=False))
        assert refusal.value.ticket
        told.append(refusal.value.retry_after_s)
    assert told[:2] == [pytest.approx(6.0, rel=0.05), pytest.approx(12.0, rel=0.05)], "the other slot has 6 s to go"
    assert it.statistics()["promises"]["open"] == 3
    with pytest.raises(EngineUnavailable):
        it.admit(rows=1, tokens=1, now=5.0, arrival=Arrival(fingerprint=1, repeat=True))
    assert it.statistics()["promises"]["open"] == 3, "it has its ticket"
    it.open_(it.limits, 10.0)
    refused(it, 10.0, Arrival(fingerprint=99, repeat=False), rows=2)
    it.admit(rows=1, tokens=1, now=11.2, arrival=Arrival(fingerprint=1, repeat=True))
    assert it.statistics()["promises"] == {"open": 3, "kept": 1, "lapsed": 0}


def test_a_server_that_has_served_nobody_tells_all_when_it_will_be_loaded() -> None:
    it = Gate(GateLimits(2, 2, 4.0), EngineUnavailable("loading"))
    it.close(EngineUnavailable("loading"), back_s=lambda: 3.0, now=0.0)
    for i in range(20):
        with pytest.raises(EngineUnavailable) as refusal:
            it.check_room(0.0, Arrival(fingerprint=i + 1, repeat=False))
        assert refusal.value.retry_after_s == pytest.approx(3.0, rel=0.05)


def test_nobody_fails_to_come_back_while_the_engine_is_away() -> None:
    """A load balancer sends nothing to a server that is not ready."""
    it = gate(running=1, waiting=0)
    lease = it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True)
    it.started(lease, 0.0, 0.0)
    refused(it, 1.0, Arrival(fingerprint=1, repeat=False))
    it.close(EngineUnavailable("restarting"), back_s=lambda: 5.0, now=5.0)
    with pytest.raises(EngineUnavailable):
        it.check_room(20.0, Arrival(fingerprint=2, repeat=False))
    it.open_(it.limits, 60.0)
    refused(it, 61.0, Arrival(fingerprint=3, repeat=False))
    assert it.statistics()["promises"] == {"open": 3, "kept": 0, "lapsed": 0}
    it.release(lease, "stop", 65.0)
    it.admit(rows=1, tokens=1, now=65.5, arrival=Arrival(fingerprint=1, repeat=True))
    assert it.statistics()["promises"]["kept"] == 1


def test_who_got_a_ticket_in_an_outage_and_stays_away_loses_it() -> None:
    """Or those who ask again and again, and can not be known, would make the line longer than it is."""
    it = gate(running=1, waiting=0)
    lease = it.admit(rows=1, tokens=1, now=0.0, service_s=1.0, certain=True)
    it.started(lease, 0.0, 0.0)
    early = refused(it, 0.5, Arrival(fingerprint=1, repeat=False))
    it.close(EngineUnavailable("restarting"), back_s=lambda: 1.0, now=1.0)
    it.close(EngineUnavailable("restarting again"), back_s=lambda: 1.0, now=2.0)
    told = []
    for i in range(200):
        with pytest.raises(EngineUnavailable) as refusal:
            it.check_room(2.0 + i, Arrival())
        told.append(refusal.value.retry_after_s or 0.0)
    assert it.statistics()["promises"]["lapsed"] >= 150
    assert max(told) < 15.0
    it.open_(it.limits, 203.0)
    it.release(lease, "stop", 203.5)
    it.admit(rows=1, tokens=1, now=204.0, arrival=Arrival(ticket_id=early.ticket))
    assert it.statistics()["promises"]["kept"] == 1


def test_tokens_come_free_later_by_the_outage() -> None:
    it = gate(running=4, waiting=0, tokens=100)
    lease = it.admit(rows=1, tokens=90, now=0.0, service_s=10.0, certain=True)
    it.started(lease, 0.0, 0.0)
    it.close(EngineUnavailable("restarting"), back_s=lambda: 8.0, now=4.0)
    with pytest.raises(EngineUnavailable) as refusal:
        it.admit(rows=1, tokens=50, now=4.0, arrival=Arrival(fingerprint=1, repeat=False))
    assert refusal.value.retry_after_s == pytest.approx(14.0, rel=0.05)


def test_one_that_was_inside_keeps_its_place_when_the_engine_goes_away() -> None:
    it = gate(running=1, waiting=2)
    leases = [it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True) for _ in range(2)]
    it.started(leases[0], 0.0, 0.0)
    it.close(EngineUnavailable("restarting"), back_s=lambda: 5.0, now=2.0)
    with pytest.raises(EngineUnavailable) as refusal:
        it.check_open(2.0, leases[1])
    assert refusal.value.ticket
    again = it.postpone(leases[1], Refusal.ENGINE_UNAVAILABLE, 2.0)
    assert (again.ticket, again.retry_after_s) == (refusal.value.ticket, refusal.value.retry_after_s)
    it.close(EngineUnavailable("failed"))
    lost = it.postpone(leases[1], Refusal.ENGINE_UNAVAILABLE, 3.0)
    assert (type(lost), lost.ticket, lost.message) == (EngineUnavailable, "", "failed")


def test_a_request_of_many_tokens_does_not_starve_beside_small_ones() -> None:
    it = gate(running=4, waiting=0, tokens=100)
    small = [it.admit(rows=1, tokens=30, now=0.0, service_s=10.0, certain=True) for _ in range(3)]
    for lease in small:
        it.started(lease, 0.0, 0.0)
    promise = refused(it, 1.0, Arrival(fingerprint=1, repeat=False), tokens=90)
    assert promise.retry_after_s is not None
    assert promise.retry_after_s >= 9.0, "when enough rows have ended"
    it.release(small[0], "stop", 10.0)
    newcomer = refused(it, 10.0, Arrival(fingerprint=2, repeat=False), tokens=30)
    assert "tokens" in str(newcomer)
    for lease in small[1:]:
        it.release(lease, "stop", 10.1)
    it.admit(rows=1, tokens=90, now=1.0 + promise.retry_after_s, arrival=Arrival(ticket_id=promise.ticket))


def test_all_rows_of_a_visit_whose_wait_is_over_are_told_the_same() -> None:
    it = gate(running=2, waiting=2)
    full(it)
    lease = next(iter(it._capacity.forecast._leases))
    first = it.postpone(lease, Refusal.WAIT_OVER, 4.0)
    second = it.postpone(lease, Refusal.WAIT_OVER, 4.0)
    assert (first.ticket, first.retry_after_s) == (second.ticket, second.retry_after_s)
    assert it.statistics()["promises"]["open"] == 1
    assert it.statistics()["refused"] == {"wait_over": 2}


def test_the_longest_promise_is_what_sdks_obey_and_is_spread() -> None:
    it = gate()
    full(it)
    told = [refused(it, 0.0, Arrival(fingerprint=i, repeat=False)).retry_after_s or 0.0 for i in range(20)]
    assert max(told) <= LONGEST_PROMISE_S
    assert min(told[8:]) >= (1 - SPREAD) * LONGEST_PROMISE_S
    assert len({*told[8:]}) == len(told[8:])


def test_a_free_slot_is_kept_for_a_ticket_no_longer_than_a_row_would_have_it() -> None:
    it = gate(2, 0, tokens=10)
    first = it.admit(rows=1, tokens=6, now=0.0, service_s=1.0)
    it.started(first, 0.0, 0.0)
    refused(it, 0.1, Arrival(fingerprint=1, repeat=False), tokens=9)
    it.release(first, "stop", 1.0)
    kept_s = it._capacity.forecast.service_s
    assert 0.5 < kept_s < 2.0
    assert refused(it, 1.1, Arrival(fingerprint=2), tokens=9).ticket
    with pytest.raises(Busy):
        it.admit(rows=1, tokens=9, now=1.1 + 0.9 * kept_s, arrival=Arrival(fingerprint=3))
    second = it.admit(rows=1, tokens=9, now=1.1 + kept_s, arrival=Arrival(fingerprint=4))
    it.release(second, "stop", 1.2 + kept_s)
    assert refused(it, 1.2 + kept_s, Arrival(fingerprint=5), tokens=9).ticket, "it is kept anew"


def test_a_free_slot_is_kept_for_several_rows_that_no_queue_could_hold() -> None:
    it = gate(running=2, waiting=0)
    leases = [it.admit(rows=1, tokens=1, now=0.0, service_s=10.0, certain=True) for _ in range(2)]
    for lease in leases:
        it.started(lease, 0.0, 0.0)
    promise = refused(it, 1.0, Arrival(fingerprint=1, repeat=False), rows=2)
    assert promise.retry_after_s is not None
    back = 1.0 + promise.retry_after_s
    for lease in leases:
        it.release(lease, "stop", back - 1.0)
    refused(it, back - 1.0, Arrival(fingerprint=2, repeat=False))
    it.admit(rows=2, tokens=1, now=back, arrival=Arrival(ticket_id=promise.ticket))
