"""`Retry-After` against what came true, in an open loop of simulated clients that come back when they were told to."""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
import statistics
from dataclasses import dataclass, field

import pytest

from treadle.core.admission_capacity import LONGEST_PROMISE_S
from treadle.core.forecast import FIRST_GUESS_S, Lease
from treadle.core.gate import Gate, GateLimits
from treadle.core.virtual_queue import Arrival
from treadle.errors import Busy, EngineUnavailable


@dataclass
class Server:
    """`running` slots, as many places to wait, and rows that take `service_s`, give or take `jitter`."""

    running: int = 4
    waiting: int = 4
    service_s: float = 2.0
    jitter: float = 0.3
    max_wait_s: float = 4.0
    seed: int = 0
    free: list[float] = field(default_factory=list)
    promises: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = GateLimits(self.running, self.waiting, self.max_wait_s, by_forecast=True)
        self.gate = Gate(limits, EngineUnavailable("loading"))
        self.gate.open_(limits)
        self.chance = random.Random(self.seed)
        self._events: list[tuple[float, int, str, Lease | Arrival | None]] = []
        self._numbers = itertools.count()
        self._queue: list[Lease] = []
        self._busy = 0

    def arrivals(self, start: float, seconds: float, load: float) -> Server:
        """Clients at `load` times what fits."""
        at = start
        while (at := at + self.chance.expovariate(load * self.running / self.service_s)) < start + seconds:
            self._push(at, "arrives")
        return self

    def run(self, until: float, *, obey: bool = True) -> Server:
        while self._events and self._events[0][0] < until:
            now, _, what, lease = heapq.heappop(self._events)
            if what == "arrives":
                self._arrives(now, obey, lease)
            elif what == "ends" and isinstance(lease, Lease):
                self._busy -= 1
                self._leaves(lease, "stop", now)
            elif isinstance(lease, Lease) and lease in self._queue:
                self._queue.remove(lease)
                self._leaves(lease, "expired", now)
        return self

    def enter(self, now: float) -> None:
        self._arrives(now, obey=False)

    def _arrives(self, now: float, obey: bool, before: Lease | Arrival | None = None) -> None:
        came = before.fingerprint if isinstance(before, Arrival) else next(self._numbers) + 1
        arrival = Arrival(fingerprint=came, repeat=before is not None)
        try:
            lease = self.gate.admit(rows=1, tokens=1, now=now, arrival=arrival)
        except Busy as busy:
            wait_s = busy.retry_after_s or 0.0
            self.promises.append((now, wait_s))
            if obey:
                self._push(now + wait_s, "arrives", arrival)
            return
        self._queue.append(lease)
        self._push(now + self.max_wait_s, "waited", lease)
        self._start(now)

    def _leaves(self, lease: Lease, outcome: str, now: float) -> None:
        self.gate.release(lease, outcome, now)
        if outcome == "stop":
            self.free.append(now)
        self._start(now)

    def _start(self, now: float) -> None:
        while self._queue and self._busy < self.running:
            self._busy += 1
            self.gate.started(self._queue[0], 0.0, now)
            took = self.service_s * self.chance.uniform(1 - self.jitter, 1 + self.jitter)
            self._push(now + took, "ends", self._queue.pop(0))

    def _push(self, at: float, what: str, lease: Lease | Arrival | None = None) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), what, lease))

    def broken(self) -> float:
        """The part of the promises at whose time no place had come free since."""
        kept = [(at, s) for at, s in self.promises if at + s <= self.free[-1]]
        empty = sum(bisect.bisect_right(self.free, at + s) == bisect.bisect_right(self.free, at) for at, s in kept)
        return empty / len(kept)

    @property
    def turnover_s(self) -> float:
        return self.service_s * (self.running + self.waiting) / self.running

    def told(self, since: float = 0.0) -> list[float]:
        return [s for at, s in self.promises if at >= since]


def told(gate: Gate, now: float) -> float:
    """What one more client is told."""
    with pytest.raises(Busy) as refusal:
        gate.check_room(now)
    assert refusal.value.retry_after_s is not None
    return refusal.value.retry_after_s


SERVERS = {
    "four": {},
    "one": {"running": 1, "waiting": 1},
    "none may wait": {"waiting": 0},
    "many that end together": {"running": 32, "waiting": 32, "jitter": 0.0},
    "long": {"service_s": 30.0},
    "short": {"service_s": 0.05},
}


@pytest.mark.untraced
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("load", [2.0, 10.0])
def test_what_is_promised_comes_true(name: str, load: float) -> None:
    """R2: when a client comes back, a place has come free; and it is not sent away for longer than SDKs obey."""
    server = Server(**SERVERS[name])  # type: ignore[arg-type]
    seconds = max(20 * server.service_s, 30.0)
    server.arrivals(0.0, seconds, load).run(seconds)
    assert server.broken() <= 0.05
    steady = server.told(since=5 * server.service_s)
    assert max(steady) <= LONGEST_PROMISE_S
    assert statistics.median(steady) >= server.service_s / server.running / 2


def test_a_burst_after_a_quiet_time_is_promised_what_the_server_can_do() -> None:
    """How seldom clients came is not how slowly they are served."""
    server = Server()
    server.arrivals(0.0, 1000.0, 0.05).run(1000.0)
    for _ in range(8):
        server.enter(1000.0)
    promised = [told(server.gate, 1000.0) for _ in range(8)]
    assert max(promised) <= 1.6 * server.turnover_s


def test_promises_are_spread_so_that_not_all_come_back_at_once() -> None:
    server = Server(running=8, waiting=8)
    server.arrivals(0.0, 60.0, 0.9).run(50.0)
    _fill(server.gate, 50.0)
    waits = [told(server.gate, 50.0) for _ in range(12)]
    assert waits == sorted(waits)
    assert waits[-1] - waits[0] >= 4 * (waits[1] - waits[0]) > 0


def test_the_promises_of_those_who_never_came_back_run_out() -> None:
    server = Server()
    server.arrivals(0.0, 60.0, 20.0).run(60.0, obey=False)
    server.arrivals(60.0, 20.0, 0.5).run(80.0)
    _fill(server.gate, 80.0)
    assert told(server.gate, 80.0) <= 1.5 * server.turnover_s


def _fill(gate: Gate, now: float) -> None:
    while gate.rows < gate.limits.places:
        gate.admit(rows=1, tokens=1, now=now)


def test_before_anything_ended_the_guess_grows_with_the_wait() -> None:
    it = Gate(GateLimits(2, 0, 0.0), EngineUnavailable("loading"))
    it.open_(GateLimits(2, 0, 0.0))
    for _ in range(2):
        it.admit(rows=1, tokens=1, now=100.0)
    soon = told(it, 100.0)
    late = told(it, 130.0)
    assert FIRST_GUESS_S <= soon <= 2 * FIRST_GUESS_S
    assert 29.0 <= late <= LONGEST_PROMISE_S


def test_a_server_where_nothing_ends_any_more_promises_later_and_later() -> None:
    server = Server()
    server.arrivals(0.0, 30.0, 1.2).run(30.0)
    _fill(server.gate, 30.0)
    waits = [told(server.gate, now) for now in (34.0, 45.0, 80.0)]
    assert waits == sorted(waits)
    assert waits[-1] > 5 * waits[0]


def test_places_that_all_come_free_at_one_moment_are_not_promised_for_now() -> None:
    it = Gate(GateLimits(64, 0, 0.0), EngineUnavailable("loading"))
    it.open_(GateLimits(64, 0, 0.0))
    lease = it.admit(rows=64, tokens=64, now=0.0)
    for _ in range(64):
        it.release(lease, "stop", 10.0)
        it.admit(rows=1, tokens=1, now=10.0)
    assert 0.01 < told(it, 10.0) <= 10.0
    assert max(told(it, 10.0) for _ in range(200)) <= 20.0
