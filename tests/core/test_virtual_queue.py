"""Tickets: how those who come back are known, and that the line stays true and bounded."""

from __future__ import annotations

import itertools
import random

import pytest

from treadle.core import tenant_tickets as parties_module
from treadle.core import virtual_queue as line_module
from treadle.core.virtual_queue import (
    DOOR_S,
    EARLY_S,
    GRACE_S,
    LATE_S,
    MOST_SWEPT,
    NEWCOMER,
    Arrival,
    Ticket,
    VirtualQueue,
)


def line(**held: int) -> VirtualQueue:
    ids = itertools.count()
    return VirtualQueue(lambda tenant: held.get(tenant, 0), lambda: f"t{next(ids)}")


def refuse(
    it: VirtualQueue, arrival: Arrival, now: float = 0.0, back: float = 10.0, rows: int | None = 1, tokens: int = 0
) -> Ticket:
    it.recognise(arrival, now)
    ticket = it.place(arrival, rows, tokens, now)
    assert ticket is not None
    it.promise(ticket, due=back, back=back, now=now)
    return ticket


def ask(fingerprint: int = 1, *, repeat: bool | None = None, tenant: str = "", via: int = 0, name: str = "") -> Arrival:
    return Arrival(tenant=tenant, fingerprint=fingerprint, ticket_id=name, repeat=repeat, via=via)


def found(it: VirtualQueue, arrival: Arrival, now: float) -> Ticket | None:
    it.recognise(arrival, now)
    return arrival.ticket


def test_a_ticket_is_found_by_its_name_at_any_time_and_by_its_tenant_alone() -> None:
    it = line()
    ticket = refuse(it, ask(tenant="a"))
    assert found(it, ask(99, tenant="a", name=ticket.id), 1.0) is ticket
    assert found(it, ask(99, tenant="b", name=ticket.id), 1.0) is None


def test_the_same_request_finds_it_where_its_client_says_that_it_repeats() -> None:
    it = line()
    ticket = refuse(it, ask(repeat=False))
    assert found(it, ask(repeat=False), 10.0) is None, "another client's first attempt"
    assert found(it, ask(2, repeat=True), 10.0) is None
    assert found(it, ask(0, repeat=True), 10.0) is None
    assert found(it, ask(repeat=True), 1.0) is ticket


def test_without_a_word_of_the_client_time_tells() -> None:
    it = line()
    ticket = refuse(it, ask())
    assert found(it, ask(), 10.0 - 2 * EARLY_S) is None
    assert found(it, ask(), 10.0 - EARLY_S) is ticket


def test_the_same_connection_tells_as_well() -> None:
    it = line()
    first, second = refuse(it, ask(via=7), back=10.0), refuse(it, ask(via=8), back=12.0)
    assert found(it, ask(via=8), 1.0) is second
    assert found(it, ask(via=9), 11.0) is first


def test_two_at_the_door_do_not_get_one_ticket() -> None:
    it = line()
    first, second = (refuse(it, ask(repeat=False), back=back) for back in (10.0, 11.0))
    assert found(it, ask(repeat=True), 10.0) is first
    assert found(it, ask(repeat=True), 10.0) is second
    assert found(it, ask(repeat=True), 10.0) is None
    assert found(it, ask(repeat=True), 10.1 + DOOR_S) in (first, second), "who was at the door did not come in"


def test_an_arrival_keeps_its_ticket_from_its_headers_to_its_body() -> None:
    it = line()
    ticket = refuse(it, ask(repeat=False))
    arrival = ask(repeat=True)
    assert found(it, arrival, 10.0) is ticket
    assert found(it, arrival, 10.2) is ticket
    assert arrival.order == ticket.order
    it.admit(ask(name=ticket.id), 10.3)
    other = ask(name=ticket.id)
    it.recognise(other, 10.3)
    it.admit(other, 10.3)
    assert found(it, arrival, 10.4) is None, "another came in with it"
    assert arrival.order == NEWCOMER


def test_refused_again_it_keeps_its_order() -> None:
    it = line()
    ticket = refuse(it, ask(1, repeat=False))
    refuse(it, ask(2, repeat=False))
    again = ask(1, repeat=True)
    assert refuse(it, again, now=10.0, back=12.0) is ticket
    assert it.rows_ahead(again) == 0
    assert it.rows_ahead(ask(3)) == 2


def test_who_was_inside_and_got_no_slot_goes_before_all_who_came_later() -> None:
    it = line()
    first = ask(1)
    it.admit(first, 0.0)
    refuse(it, ask(2))
    ticket = it.place(first, 1, 0, 4.0)
    assert ticket is not None
    it.promise(ticket, due=10.0, back=10.0, now=4.0)
    assert it.rows_ahead(first) == 0
    it.admit(ask(name=ticket.id), 5.0)
    it.recognise(again := ask(name=ticket.id), 10.0)
    it.admit(again, 10.0)
    assert it.place(first, 1, 0, 11.0) is not ticket, "that one is used up"


def test_a_place_is_kept_for_a_while_and_the_order_for_longer() -> None:
    it = line()
    refuse(it, ask(repeat=False))
    it.sweep(10.0 + GRACE_S)
    assert len(it) == 1
    it.sweep(12.6)
    assert (len(it), it.lapsed) == (0, 1)
    late = ask(repeat=True)
    assert found(it, late, 20.0) is not None
    it.sweep(12.6 + LATE_S)
    assert empty(it)
    assert found(it, ask(repeat=True), 80.0) is None


def test_a_ticket_that_was_promised_anew_lapses_by_its_new_time() -> None:
    it = line()
    refuse(it, ask(repeat=False))
    refuse(it, ask(repeat=True), now=10.0, back=30.0)
    it.sweep(20.0)
    assert len(it) == 1


def test_those_who_never_come_back_count_for_less_and_less() -> None:
    it = line()
    for i in range(40):
        refuse(it, ask(i + 1, repeat=False))
        refuse(it, ask(i + 1000))
    sweep_all(it, 12.6)
    sdk = refuse(it, ask(5000, repeat=False), now=13.0, back=20.0)
    refuse(it, ask(5001), now=13.0, back=20.0)
    assert it.rows_ahead(ask(6000)) < 0.2
    it.recognise(again := ask(name=sdk.id), 20.0)
    it.admit(again, 20.0)
    refuse(it, ask(5002, repeat=False), now=21.0)
    refuse(it, ask(5003), now=21.0)
    assert it.rows_ahead(ask(6000)) > 0.1, "of clients that say what is a repeat, one came"


def test_rows_that_are_not_known_count_as_the_usual() -> None:
    it = line()
    for _ in range(200):
        it.saw(ask(), 4)
    guessed = refuse(it, ask(1, repeat=False), rows=None)
    assert it.rows_ahead(ask(2)) == pytest.approx(4.0, rel=0.1)
    it.saw(again := ask(1, repeat=True), 2)
    refuse(it, again, now=10.0, rows=2)
    assert not guessed.guessed
    assert it.rows_ahead(ask(2)) == 2
    before = it._usual_rows
    it.saw(again, 2)
    assert it._usual_rows == before, "counted once"


def test_between_tenants_the_lower_level_goes_first() -> None:
    it = line(a=3, b=0)
    for i in range(4):
        refuse(it, ask(10 + i, tenant="a"), back=10.0 + i)
    refuse(it, ask(20, tenant="b"), back=5.0)
    assert it.rows_ahead(ask(30, tenant="b")) == 1, "its own: all of a's are on higher levels"
    assert it.rows_ahead(ask(31, tenant="c")) == 1, "b's is on the same level and came earlier"
    assert it.rows_ahead(ask(32, tenant="a")) == 5
    assert [due for due, _, _ in it.needs(ask(30, tenant="b"), 99.0)] == [5.0]
    assert [due for due, _, _ in it.needs(ask(32, tenant="a"), 11.0)] == [5.0, 10.0, 11.0]
    assert [due for due, _, _ in line().needs(ask(), 99.0)] == []


def test_on_one_level_the_earlier_goes_first() -> None:
    it = line()
    refuse(it, ask(1, tenant="a"))
    refuse(it, ask(2, tenant="b"))
    assert it.rows_ahead(ask(3, tenant="c")) == 2
    assert it.rows_ahead(ask(3, tenant="a")) == 2
    early = Arrival(tenant="c", order=0)
    assert it.rows_ahead(early) == 0


def test_the_table_is_bounded_and_the_tenant_with_the_most_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "MOST_TICKETS", 4)
    it = line()
    tickets = [refuse(it, ask(i + 1, tenant="a")) for i in range(4)]
    late = ask(9, tenant="a")
    it.recognise(late, 0.0)
    assert it.place(late, 1, 0, 0.0) is None
    refuse(it, ask(1, tenant="b"))
    assert len(it._tickets) == 4
    assert found(it, ask(99, tenant="a", name=tickets[-1].id), 0.0) is None, "a's newest"
    assert found(it, ask(99, tenant="a", name=tickets[-2].id), 0.0) is tickets[-2]


def test_tickets_that_hold_no_place_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "MOST_TICKETS", 2)
    it = line()
    lapsed = refuse(it, ask(1, tenant="a"))
    refuse(it, ask(2, tenant="a"), back=50.0)
    it.sweep(13.0)
    refuse(it, ask(3, tenant="a"), now=13.0, back=50.0)
    assert lapsed.id not in it._tickets
    assert len(it) == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_books_agree_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    it = line(a=1, b=2)
    arrivals: list[Arrival] = []
    now = 0.0
    for _ in range(400):
        now += chance.uniform(0.0, 1.0)
        it.sweep(now)
        tenant, repeat = chance.choice("abc"), chance.choice((True, False, None))
        arrival = (
            chance.choice(arrivals)
            if arrivals and chance.random() < 0.3
            else ask(chance.randint(0, 30), tenant=tenant, repeat=repeat, via=chance.randint(0, 9))
        )
        if chance.random() < 0.4:
            it.recognise(arrival, now)
            it.admit(arrival, now)
        else:
            rows = chance.choice((None, 1, 4))
            refuse(it, arrival, now=now, back=now + chance.uniform(0.1, 30.0), rows=rows)
        arrivals.append(arrival)
        assert it.rows_ahead(arrival) >= 0
        parties = it._tenants._tenants.values()
        listed = [ticket for party in parties for ticket in party.tickets]
        assert len(listed) == len(it._dues) == len(it)
        assert {ticket for *_, ticket in it._ends} == {*it._tickets.values()}
        assert len(it._ends) == len(it._tickets)
        assert {*it._lapsed} == {ticket for ticket in it._tickets.values() if not ticket.in_line}
        assert all(ticket.in_line and ticket.id in it._tickets for ticket in listed)
        for party in parties:
            assert party.rows == sum(ticket.rows for ticket in party.tickets)
            assert [t.order for t in party.tickets] == sorted(t.order for t in party.tickets)
    sweep_all(it, now + 200.0)
    assert empty(it)


def sweep_all(it: VirtualQueue, now: float) -> None:
    while it._ends and it._ends[0][0] <= now:
        it.sweep(now)


def test_tickets_that_end_together_are_looked_after_a_few_at_a_time_and_hold_nothing() -> None:
    it = line()
    for i in range(3 * MOST_SWEPT):
        refuse(it, ask(i + 1, repeat=False, tenant=f"s{i % 5}"))
    newcomer = ask(9999, repeat=False)
    assert len([*it.needs(newcomer, 99.0, 11.0)]) == 5, "the first of each tenant"
    it.sweep(20.0)
    assert (len(it), it.lapsed) == (2 * MOST_SWEPT, MOST_SWEPT)
    assert [*it.needs(newcomer, 99.0, 20.0)] == []
    sweep_all(it, 20.0)
    assert (len(it), it.lapsed) == (0, 3 * MOST_SWEPT)


def empty(it: VirtualQueue) -> bool:
    parties = it._tenants
    of_tenants = (parties._tenants, parties._many, parties._sizes, parties._index._levels, parties._index._sums)
    return not any((it._tickets, it._alike, it._dues, it._ends, it._lapsed, *of_tenants))


@pytest.mark.parametrize("few", [0, 2, 32])
@pytest.mark.parametrize("seed", range(10))
def test_rows_ahead_are_counted_as_defined_with_any_number_of_tickets(
    seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parties_module, "FEW", few)
    chance, held = random.Random(seed), dict.fromkeys("abcdef", 0)
    it = VirtualQueue(held.__getitem__, lambda: f"t{chance.random()}")
    each = chance.choice((1, 3))
    for i in range(120):
        tenant = chance.choice("aaabcdef")
        if chance.random() < 0.3:
            held[tenant] = chance.randrange(5)
            it.moved(tenant)
        arrival = ask(i + 1, tenant=tenant, repeat=False)
        ahead = it.rows_ahead(arrival)
        assert ahead == pytest.approx(sum(t.rows for t in all_ahead(it, held, arrival)))
        ticket = refuse(it, arrival, rows=each)
        assert it.rows_ahead(arrival) == pytest.approx(ahead)
        if chance.random() < 0.3:
            other = chance.choice([*it._tickets.values()])
            again = ask(other.fingerprint, tenant=other.tenant, name=other.id)
            it.recognise(again, 5.0)
            assert it.rows_ahead(again) == pytest.approx(sum(t.rows for t in all_ahead(it, held, again)))
            if other is not ticket:
                it.admit(again, 5.0)


def all_ahead(it: VirtualQueue, held: dict[str, int], arrival: Arrival) -> list[Ticket]:
    """The definition: lower levels first, on one level the earlier."""
    tickets = sorted((t for t in it._tickets.values() if t.in_line), key=lambda t: t.order)
    mine = held[arrival.tenant] + sum(t.rows for t in tickets if t.tenant == arrival.tenant and t.order < arrival.order)
    levels, found = dict(held), []
    for ticket in tickets:
        level = levels[ticket.tenant]
        levels[ticket.tenant] += ticket.rows
        same = ticket.tenant == arrival.tenant
        if ticket.order < arrival.order if same else (level, ticket.order) < (mine, arrival.order):
            found.append(ticket)
    return found


def test_the_line_is_looked_after_by_one_entry_a_ticket() -> None:
    """Those who are refused again and again, or come in, leave nothing behind."""
    it = line()
    for i in range(50):
        for k in range(10):
            refuse(it, ask(k + 1, repeat=i > 0), now=float(i), back=i + 30.0)
    assert len(it._ends) == len(it._tickets) == 10
    for k in range(10):
        again = ask(k + 1, repeat=True)
        it.recognise(again, 60.0)
        it.admit(again, 60.0)
    assert empty(it)


def test_a_crowd_of_tenants_with_one_ticket_each_does_not_drop_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "MOST_TICKETS", 4)
    it = line()
    tickets = [refuse(it, ask(1, tenant=name)) for name in "abcd"]
    late = ask(1, tenant="e")
    it.recognise(late, 0.0)
    assert it.place(late, 1, 0, 0.0) is None
    assert all(ticket.in_line for ticket in tickets)


def test_the_tenant_with_the_most_is_the_one_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "MOST_TICKETS", 4)
    it = line()
    for ticket in [refuse(it, ask(i + 1, tenant="a")) for i in range(4)][1:]:
        it.recognise(again := ask(name=ticket.id, tenant="a"), 1.0)
        it.admit(again, 1.0)
    others = [refuse(it, ask(i + 1, tenant=name)) for i, name in enumerate("bcc")]
    refuse(it, ask(1, tenant="d"))
    assert [ticket.in_line for ticket in others] == [True, True, False]


def test_tickets_do_not_lapse_while_the_engine_is_away_and_are_due_later_by_as_long() -> None:
    it = line()
    over = refuse(it, ask(1, repeat=False), back=5.0)
    it.sweep(8.0)
    early = refuse(it, ask(2, repeat=False), now=8.0, back=10.0)
    it.hold()
    later = refuse(it, ask(3, repeat=False), now=12.0, back=13.0)
    it.sweep(40.0)
    assert (over.in_line, early.in_line, later.in_line, it.lapsed) == (False, True, False, 2)
    late = refuse(it, ask(4, repeat=False), now=40.0, back=41.0)
    it.shift(9.0, 50.0)
    assert (early.due, early.back, early.turn, early.until) == (51.0, 10.0, 51.0, pytest.approx(52.7))
    assert (late.due, late.until) == (50.0, 50.0 + GRACE_S)
    assert [ticket for *_, ticket in it._dues] == [late, early]
    sweep_all(it, 52.8)
    assert (len(it), it.lapsed) == (0, 4)


def test_of_alike_requests_the_first_that_is_due_is_taken() -> None:
    """Clients come when told or later; a ticket whose grace is over is taken where none is due."""
    it = line()
    tickets = [refuse(it, ask(repeat=False), back=10.0 + 2 * i) for i in range(5)]
    assert found(it, ask(repeat=True), 12.4) is tickets[0]
    assert found(it, ask(repeat=True), 13.0) is tickets[1]
    assert found(it, ask(), 16.1) is tickets[2]
    assert found(it, ask(repeat=True), 30.0) is tickets[4]


def test_of_many_alike_requests_the_first_are_compared() -> None:
    it = line()
    tickets = [refuse(it, ask(repeat=False, via=i + 1), back=10.0 + i) for i in range(line_module.MOST_ALIKE + 10)]
    assert found(it, ask(repeat=True, via=999), 5.0) is tickets[0]
    assert found(it, ask(repeat=True, via=len(tickets)), 5.0) is tickets[-1], "the same connection is known at once"
