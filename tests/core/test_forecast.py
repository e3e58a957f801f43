"""The forecast of free slots, alone and under crowds of simulated clients that obey it as the official SDKs do."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from treadle.core.forecast import ENOUGH_ANSWERS, LONGEST_PROMISE_S, MOST_PROMISES, SPREAD, Forecast, Visit
from treadle.core.gate import Gate, GateLimits
from treadle.errors import Busy, EngineUnavailable

SDK_ATTEMPTS = 3  # of the official SDKs at their defaults: one, and two retries


@dataclass
class Client:
    came: float
    attempts: int = 0
    told: list[tuple[float, float]] = field(default_factory=list)
    began: float | None = None


class Crowd:
    """Clients that all come at once to a fresh server, whose rows take about `service_s` where the warm-up said
    `measured_s`, and come back when they were told to, for up to three attempts."""

    def __init__(
        self,
        clients: int,
        *,
        slots: int = 16,
        service_s: float = 10.0,
        measured_s: float = 10.0,
        jitter: float = 0.1,
        max_wait_s: float = 4.0,
    ) -> None:
        self.slots, self.service_s, self.measured_s, self.jitter = slots, service_s, measured_s, jitter
        self.max_wait_s = max_wait_s
        limits = GateLimits(slots, slots, max_wait_s, by_forecast=True)
        self.gate = Gate(limits, EngineUnavailable("loading"))
        self.gate.open_(limits)
        self.chance = random.Random(7)
        self.clients = [Client(0.001 * i) for i in range(clients)]
        self._events: list[tuple[float, int, str, Client, Visit | None]] = []
        self._order = itertools.count()
        self._queue: list[tuple[Visit, Client]] = []
        self._busy = 0
        for client in self.clients:
            self._at(client.came, "comes", client)

    def run(self) -> Crowd:
        while self._events:
            now, _, what, client, visit = heapq.heappop(self._events)
            if what == "comes":
                self._comes(client, now)
            elif what == "ends":
                self._busy -= 1
                self._leaves(visit, "stop", now)
            elif (visit, client) in self._queue:
                self._queue.remove((visit, client))
                self._leaves(visit, "expired", now)
                self._refused(client, self.gate.retry_after_s(now), now)
        return self

    @property
    def failed(self) -> int:
        return sum(client.began is None for client in self.clients)

    def first_promises_kept(self) -> float:
        """The part of first promises that were within half of the wait that came true."""
        pairs = [(c.told[0][1], c.began - c.told[0][0]) for c in self.clients if c.told and c.began is not None]
        return sum(abs(told - true) <= 0.5 * true for told, true in pairs) / len(pairs)

    def _comes(self, client: Client, now: float) -> None:
        client.attempts += 1
        try:
            visit = self.gate.enter(rows=1, tokens=1, now=now, service_s=self.measured_s, certain=True)
        except Busy as busy:
            self._refused(client, busy.retry_after_s or 0.0, now)
            return
        self._queue.append((visit, client))
        self._at(now + self.max_wait_s, "waited", client, visit)
        self._start(now)

    def _refused(self, client: Client, wait_s: float, now: float) -> None:
        client.told.append((now, wait_s))
        if client.attempts < SDK_ATTEMPTS:
            self._at(now + wait_s, "comes", client)

    def _leaves(self, visit: Visit | None, outcome: str, now: float) -> None:
        assert visit is not None
        self.gate.leave(visit, outcome, now)
        self._start(now)

    def _start(self, now: float) -> None:
        while self._queue and self._busy < self.slots:
            self._busy += 1
            visit, client = self._queue.pop(0)
            client.began = now
            self.gate.started(visit, 0.0, now)
            took_s = self.service_s * self.chance.uniform(1 - self.jitter, 1 + self.jitter)
            self._at(now + took_s, "ends", client, visit)

    def _at(self, at: float, what: str, client: Client, visit: Visit | None = None) -> None:
        heapq.heappush(self._events, (at, next(self._order), what, client, visit))


MACHINES: dict[str, dict[str, float]] = {
    "as measured": {},
    "half as fast as measured": {"measured_s": 5.0},
    "faster than measured": {"measured_s": 16.0},
    "answers of many lengths": {"jitter": 0.5},
    "short answers": {"service_s": 1.0, "measured_s": 1.0},
}


@pytest.mark.parametrize("machine", MACHINES)
def test_three_times_the_slots_are_all_answered(machine: str) -> None:
    """R2, D2: clients with two retries, on a server that has answered nobody yet."""
    crowd = Crowd(48, **MACHINES[machine]).run()  # type: ignore[arg-type]
    assert crowd.failed == 0
    assert crowd.gate.rows == 0


@pytest.mark.parametrize("machine", ["as measured", "faster than measured", "short answers"])
def test_first_promises_come_true(machine: str) -> None:
    """R2: within half of what was true, before a single answer was measured."""
    assert Crowd(48, **MACHINES[machine]).run().first_promises_kept() >= 0.9  # type: ignore[arg-type]


def test_six_times_the_slots_are_all_answered_within_what_sdks_obey() -> None:
    assert Crowd(96).run().failed == 0


# Parts


def forecast(slots: int = 2, service_s: float = 10.0, rows: int = 2) -> Forecast:
    """With `rows` that began at 0."""
    it = Forecast(slots)
    for _ in range(rows):
        visit = Visit(1, 1, 0.0, service_s=service_s, certain=True)
        it.enter(visit, 0.0)
        it.start(visit, 0.0)
    return it


def test_places_in_line_get_the_slots_in_the_order_in_which_they_come_free() -> None:
    it = forecast(rows=1)
    later = Visit(1, 1, 4.0, service_s=10.0, certain=True)
    it.enter(later, 4.0)
    it.start(later, 4.0)
    assert [it.promise(1, 4.0) for _ in range(4)] == pytest.approx([6.0, 10.0, 16.0, 20.0])


def test_a_request_of_several_rows_is_promised_a_time_at_which_all_have_slots() -> None:
    it = forecast(rows=1)
    later = Visit(1, 1, 4.0, service_s=10.0, certain=True)
    it.enter(later, 4.0)
    it.start(later, 4.0)
    assert it.promise(2, 4.0) == pytest.approx(10.0)
    assert it.promise(1, 4.0) == pytest.approx(16.0), "both places are promised"


def test_rows_that_wait_are_in_line_before_those_who_are_refused() -> None:
    it = forecast()
    it.enter(Visit(1, 1, 0.0, service_s=10.0, certain=True), 0.0)
    assert [it.promise(1, 0.0) for _ in range(2)] == pytest.approx([10.0, 20.0])


def test_a_row_that_is_late_is_expected_to_need_half_as_long_again() -> None:
    it = forecast(slots=2, service_s=10.0)
    assert it.promise(1, 13.0) == pytest.approx(6.5)
    it = forecast(slots=1, rows=1)
    assert it.promise(1, 13.0) == pytest.approx(10.0), "no less than what there is between two departures"
    assert it.promise(1, 40.0) == pytest.approx(30.0), "or as long again as it is late"


def test_slower_steps_than_in_the_warm_up_stretch_what_is_expected() -> None:
    it = forecast(slots=1, rows=1)
    for _ in range(50):
        it.step(3.0)
    assert it.promise(1, 0.0) == pytest.approx(30.0, rel=0.01)
    it.reset(1)
    assert it.pace == 1.0


def test_answers_that_end_early_shorten_what_is_expected() -> None:
    it = forecast(slots=1, rows=0)
    for i in range(60):
        visit = Visit(1, 1, 10.0 * i, service_s=10.0)
        it.enter(visit, visit.entered)
        it.start(visit, visit.entered)
        visit.rows = 0
        it.leave(visit, visit.entered + 2.0, answered=True)
    visit = Visit(1, 1, 1000.0, service_s=10.0)
    it.enter(visit, 1000.0)
    it.start(visit, 1000.0)
    assert it.promise(1, 1000.0) == pytest.approx(2.0, rel=0.01)


def test_without_step_times_the_first_answer_replaces_the_guess() -> None:
    it = Forecast(1)
    visit = Visit(1, 1, 0.0)
    it.enter(visit, 0.0)
    it.start(visit, 0.0)
    visit.rows = 0
    it.leave(visit, 7.0, answered=True)
    visit = Visit(1, 1, 7.0)
    it.enter(visit, 7.0)
    it.start(visit, 7.0)
    assert it.promise(1, 7.0) == pytest.approx(7.0)


def test_a_row_that_never_held_a_slot_teaches_nothing() -> None:
    it = forecast(slots=1, rows=1)
    waits = Visit(1, 1, 0.0, service_s=10.0)
    it.enter(waits, 0.0)
    waits.rows = 0
    it.leave(waits, 4.0, answered=False)
    assert it.promise(1, 4.0) == pytest.approx(10.0), "the slot's ten seconds less four, and no less than a departure"


def test_the_longest_promise_is_what_sdks_obey_and_is_spread() -> None:
    it = forecast(slots=1, rows=1, service_s=50.0)
    told = [it.promise(1, 0.0) for _ in range(9)]
    assert told[0] == pytest.approx(50.0)
    assert max(told) <= LONGEST_PROMISE_S
    assert min(told[1:]) >= (1 - SPREAD) * LONGEST_PROMISE_S
    assert len(set(told)) == len(told)


def test_the_line_of_promises_is_bounded() -> None:
    it = forecast(slots=64, rows=64, service_s=0.001)
    told = [it.promise(1, 0.0) for _ in range(MOST_PROMISES + 10)]
    assert max(told[:MOST_PROMISES]) < 1.0
    assert min(told[-5:]) > 1.0


def test_promises_are_dropped_once_slots_have_stood_free_for_as_long_as_an_answer_takes() -> None:
    it = Forecast(1)
    first = Visit(1, 1, 0.0, service_s=10.0)
    it.enter(first, 0.0)
    it.start(first, 0.0)
    promised = [it.promise(1, 0.0) for _ in range(5)]
    first.rows = 0
    it.leave(first, 10.0, answered=True)
    second = Visit(1, 1, 30.0, service_s=10.0)
    it.enter(second, 30.0)
    assert promised[-1] > 40.0
    assert it.promise(1, 30.0) == pytest.approx(10.0)


# Whether waiting can help


def test_nobody_waits_for_a_slot_that_will_not_come_free_in_time() -> None:
    it = forecast(rows=1)
    assert not it.hopeless(0.0, 4.0), "a slot is free"
    it = forecast()
    assert it.hopeless(0.0, 4.0)
    assert not it.hopeless(3.0, 4.0), "in doubt one may wait: seven seconds may turn out to be four"
    assert not forecast(service_s=5.0).hopeless(0.0, 4.0)


def test_answers_of_unknown_length_let_others_wait_until_enough_of_them_were_seen() -> None:
    it = Forecast(1)
    now = 0.0
    for _ in range(ENOUGH_ANSWERS):
        visit = Visit(1, 1, now, service_s=100.0)
        it.enter(visit, now)
        it.start(visit, now)
        assert not it.hopeless(now, 4.0)
        visit.rows = 0
        now += 100.0
        it.leave(visit, now, answered=True)
    visit = Visit(1, 1, now, service_s=100.0)
    it.enter(visit, now)
    it.start(visit, now)
    assert it.hopeless(now, 4.0)


def test_a_gate_by_forecast_refuses_a_hopeless_wait_at_once_and_says_so() -> None:
    """D1, D2"""
    limits = GateLimits(1, 1, 4.0, by_forecast=True)
    it = Gate(limits, EngineUnavailable("loading"))
    it.open_(limits)
    visit = it.enter(rows=1, tokens=1, now=0.0, service_s=20.0, certain=True)
    it.started(visit, 0.0, 0.0)
    for ask in (lambda: it.check_room(0.0), lambda: it.enter(rows=1, tokens=1, now=0.0)):
        with pytest.raises(Busy, match=r"no slot is expected to come free within the 4 s that a request may wait"):
            ask()
    assert it.statistics()["refused"] == {"wait_too_long": 2}
    it.enter(rows=1, tokens=1, now=19.0, service_s=20.0, certain=True)


def test_a_full_servers_steps_set_the_pace_and_no_others() -> None:
    limits = GateLimits(2, 0, 4.0)
    it = Gate(limits, EngineUnavailable("loading"))
    it.open_(limits)
    visit = it.enter(rows=1, tokens=1, now=0.0, service_s=10.0)
    it.started(visit, 0.0, 0.0)
    for _ in range(40):
        it.stepped(0.5)
    it.started(it.enter(rows=1, tokens=1, now=0.0, service_s=10.0), 0.0, 0.0)
    assert it.retry_after_s(0.0) == pytest.approx(10.0)
    for _ in range(60):
        it.stepped(2.0)
    assert it.retry_after_s(1.0) == pytest.approx(19.0, rel=0.01)
