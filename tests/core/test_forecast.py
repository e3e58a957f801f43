"""The forecast of free slots, and whether waiting for one can help."""

from __future__ import annotations

import pytest

from treadle.core.forecast import ENOUGH_ANSWERS, SHORTEST_S, TURNS, Forecast, Lease
from treadle.core.gate import Gate, GateLimits
from treadle.core.virtual_queue import Arrival
from treadle.errors import Busy, EngineUnavailable


def told(it: Gate, now: float) -> float | None:
    """What a client is told that always comes with the same request."""
    with pytest.raises(Busy) as refusal:
        it.check_room(now, Arrival(fingerprint=1, repeat=True))
    return refusal.value.retry_after_s


# Parts


def waits(it: Forecast, place: int, now: float) -> float:
    """Seconds until the row at this place of the line has a slot."""
    return it.slot_at(place, now) - now


def forecast(slots: int = 2, service_s: float = 10.0, rows: int = 2) -> Forecast:
    """With `rows` that began at 0."""
    it = Forecast(slots)
    for _ in range(rows):
        lease = Lease(1, 1, 0.0, service_s=service_s, certain=True)
        it.enter(lease)
        it.start(lease, 0.0)
    return it


def test_places_in_line_get_the_slots_in_the_order_in_which_they_come_free() -> None:
    it = forecast(rows=1)
    later = Lease(1, 1, 4.0, service_s=10.0, certain=True)
    it.enter(later)
    it.start(later, 4.0)
    assert [waits(it, place, 4.0) for place in range(4)] == pytest.approx([6.0, 10.0, 16.0, 20.0])


def test_a_slot_that_comes_free_early_is_taken_again_before_one_that_is_held_for_long() -> None:
    """Requests of mixed lengths: the line does not wait for the slowest slot."""
    it = forecast(rows=1, service_s=100.0)
    for _ in range(60):
        short = Lease(1, 1, 0.0, service_s=2.0, certain=True)
        it.enter(short)
        short.rows = 0
        it.leave(short, 0.0, answered=False)
    now = Lease(1, 1, 0.0, service_s=2.0, certain=True)
    it.enter(now)
    it.start(now, 0.0)
    assert waits(it, 3, 0.0) < 30.0


def test_what_lived_through_an_outage_teaches_nothing() -> None:
    it = forecast(rows=2)
    before = waits(it, 0, 0.0)
    for lease in list(it._leases):
        lease.interrupted, lease.rows = True, 0
        it.leave(lease, 600.0, answered=True)
    for _ in range(2):
        it.enter(one := Lease(1, 1, 600.0, service_s=10.0, certain=True))
        it.start(one, 600.0)
    assert waits(it, 0, 600.0) == pytest.approx(before)


def test_departures_are_those_of_slots_that_are_taken() -> None:
    it = forecast(slots=3, rows=2)
    assert [it.departures(until, 0.0) for until in (-1.0, 0.0, 9.9, 10.0, 99.0)] == [0, 0, 0, 2, 2]


def test_tokens_come_free_with_the_rows_that_hold_them() -> None:
    it = Forecast(2)
    for service_s, tokens in ((10.0, 100), (20.0, 50)):
        lease = Lease(1, tokens, 0.0, service_s=service_s, certain=True)
        it.enter(lease)
        it.start(lease, 0.0)
    assert [it.tokens_freed(until, 0.0) for until in (9.0, 10.0, 20.0)] == [0, 100, 150]
    assert [it.tokens_at(missing, 0.0) for missing in (60, 120, 1000)] == [10.0, 20.0, 20.0]
    assert Forecast(1).tokens_at(5, 3.0) == 3.0


def test_rows_that_wait_are_in_line_before_those_who_are_refused() -> None:
    it = forecast()
    it.enter(Lease(1, 1, 0.0, service_s=10.0, certain=True))
    it.refresh(0.0)
    assert it.waiting == 1


def test_a_row_that_is_late_is_expected_to_need_half_as_long_again() -> None:
    it = forecast(slots=1, rows=1)
    assert waits(it, 0, 13.0) == pytest.approx(6.5)
    assert waits(it, 0, 40.0) == pytest.approx(30.0), "or as long again as it is late"


def test_slower_steps_than_in_the_warm_up_stretch_what_is_expected() -> None:
    it = forecast(slots=1, rows=1)
    for _ in range(50):
        it.step(3.0)
    assert waits(it, 0, 0.0) == pytest.approx(30.0, rel=0.01)
    it.reset(1)
    assert it.pace == 1.0


def test_answers_that_end_early_shorten_what_is_expected() -> None:
    it = forecast(slots=1, rows=0)
    for i in range(60):
        lease = Lease(1, 1, 10.0 * i, service_s=10.0)
        it.enter(lease)
        it.start(lease, lease.entered)
        lease.rows = 0
        it.leave(lease, lease.entered + 2.0, answered=True)
    lease = Lease(1, 1, 1000.0, service_s=10.0)
    it.enter(lease)
    it.start(lease, 1000.0)
    assert waits(it, 0, 1000.0) == pytest.approx(2.0, rel=0.01)


def test_without_step_times_the_first_answer_replaces_the_guess() -> None:
    it = Forecast(1)
    lease = Lease(1, 1, 0.0)
    it.enter(lease)
    it.start(lease, 0.0)
    lease.rows = 0
    it.leave(lease, 7.0, answered=True)
    lease = Lease(1, 1, 7.0)
    it.enter(lease)
    it.start(lease, 7.0)
    assert waits(it, 0, 7.0) == pytest.approx(7.0)


def test_a_row_that_never_held_a_slot_teaches_nothing() -> None:
    it = forecast(slots=1, rows=1)
    lease = Lease(1, 1, 0.0, service_s=10.0)
    it.enter(lease)
    lease.rows = 0
    it.leave(lease, 4.0, answered=False)
    assert waits(it, 0, 4.0) == pytest.approx(6.0), "the slot's ten seconds less four"


def test_far_places_are_not_forecast_one_by_one() -> None:
    it = forecast(slots=2, service_s=10.0)
    assert [waits(it, place, 0.0) for place in (999, 1000)] == pytest.approx([5000.0, 5010.0])
    assert it.slot_at(2 * TURNS - 1, 0.0) == pytest.approx(it.slot_at(2 * TURNS, 0.0) - 10.0)


def test_rows_that_take_no_time_at_all_still_leave_one_after_another() -> None:
    it = Forecast(1)
    lease = Lease(1, 1, 0.0)
    it.enter(lease)
    it.start(lease, 0.0)
    lease.rows = 0
    it.leave(lease, 0.0, answered=True)
    assert waits(it, 1, 0.0) == SHORTEST_S


# Whether waiting can help


def test_nobody_waits_for_a_slot_that_will_not_come_free_in_time() -> None:
    it = forecast(rows=1)
    assert not it.hopeless(0, 0.0, 4.0), "a slot is free"
    it = forecast()
    assert it.hopeless(0, 0.0, 4.0)
    assert not it.hopeless(0, 3.0, 4.0), "in doubt one may wait: seven seconds may turn out to be four"
    assert not forecast(service_s=5.0).hopeless(0, 0.0, 4.0)


def test_answers_of_unknown_length_let_others_wait_until_enough_of_them_were_seen() -> None:
    it = Forecast(1)
    now = 0.0
    for _ in range(ENOUGH_ANSWERS):
        lease = Lease(1, 1, now, service_s=100.0)
        it.enter(lease)
        it.start(lease, now)
        assert not it.hopeless(0, now, 4.0)
        lease.rows = 0
        now += 100.0
        it.leave(lease, now, answered=True)
    lease = Lease(1, 1, now, service_s=100.0)
    it.enter(lease)
    it.start(lease, now)
    assert it.hopeless(0, now, 4.0)


def test_a_gate_by_forecast_refuses_a_hopeless_wait_at_once_and_says_so() -> None:
    """D1, D2"""
    limits = GateLimits(1, 1, 4.0, by_forecast=True)
    it = Gate(limits, EngineUnavailable("loading"))
    it.open_(limits)
    lease = it.admit(rows=1, tokens=1, now=0.0, service_s=20.0, certain=True)
    it.started(lease, 0.0, 0.0)
    for ask in (lambda: it.check_room(0.0), lambda: it.admit(rows=1, tokens=1, now=0.0)):
        with pytest.raises(Busy, match=r"no slot is expected to come free within the 4 s that a request may wait"):
            ask()
    assert it.statistics()["refused"] == {"wait_too_long": 2}
    it.admit(rows=1, tokens=1, now=19.0, service_s=20.0, certain=True)


def test_a_full_servers_steps_set_the_pace_and_no_others() -> None:
    limits = GateLimits(2, 0, 4.0)
    it = Gate(limits, EngineUnavailable("loading"))
    it.open_(limits)
    lease = it.admit(rows=1, tokens=1, now=0.0, service_s=10.0)
    it.started(lease, 0.0, 0.0)
    for _ in range(40):
        it.stepped(0.5)
    it.started(it.admit(rows=1, tokens=1, now=0.0, service_s=10.0), 0.0, 0.0)
    assert told(it, 0.0) == pytest.approx(10.0, rel=0.05)
    for _ in range(60):
        it.stepped(2.0)
    assert told(it, 1.0) == pytest.approx(19.0, rel=0.05)
