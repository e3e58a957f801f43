"""Simulated clients around a real gate: a fake clock, a seed, and slots that serve tenants in turn as the scheduler."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from treadle.core.forecast import Lease
from treadle.core.gate import Gate, GateLimits
from treadle.core.refusals import Refusal
from treadle.core.virtual_queue import Arrival
from treadle.errors import Busy, EngineUnavailable, TreadleError

TRAVEL_S = 0.02  # from a client to the gate


@dataclass(eq=False)
class Client:
    """One request, sent at `at` and again when told to, `attempts` times at most (0: without end). `service_s` is how
    long each of its `rows` holds a slot, `expected_s` what the server computes. `poll_s`: it comes back after so long,
    whatever it was told. `seconds`: it reads the header in whole seconds. `counts`: it says what is a repeat."""

    at: float = 0.0
    tenant: str = ""
    rows: int = 1
    tokens: int = 1
    service_s: float = 2.0
    expected_s: float = 0.0
    certain: bool = False
    attempts: int = 0
    poll_s: float = 0.0
    seconds: bool = False
    counts: bool = True
    fingerprint: int = 0
    via: int = 0
    late_s: float = 0.0  # it comes back by up to so much later than it was told
    fresh: bool = False  # each attempt is another request
    sent: int = 0
    told: list[tuple[float, float]] = field(default_factory=list)
    entered: float | None = None
    began: float | None = None
    gave_up: bool = False
    last: bool = True  # nothing follows it

    def next_s(self, told_s: float) -> float:
        if self.poll_s:
            return self.poll_s
        return math.ceil(told_s) if self.seconds else told_s


class Crowd:
    """Runs clients to their ends. `after` makes a client's successor, for closed loops."""

    def __init__(
        self,
        clients: list[Client],
        *,
        running: int = 4,
        waiting: int | None = None,
        max_wait_s: float = 4.0,
        tokens: int = 0,
        jitter: float = 0.1,
        seed: int = 0,
        after: Callable[[Client, float], Client | None] = lambda client, now: None,
        outage: tuple[float, float, float] | None = None,
    ) -> None:
        """`outage`: the engine is away from a time, for so many seconds, and is first expected for so many."""
        self.running, self.max_wait_s, self.jitter, self.after = running, max_wait_s, jitter, after
        by_forecast = waiting is None
        limits = GateLimits(running, running if waiting is None else waiting, max_wait_s, tokens, by_forecast)
        ids = itertools.count()
        self.gate = Gate(limits, EngineUnavailable("loading"), new_id=lambda: f"t{next(ids)}")
        self.gate.open_(limits)
        self.chance = random.Random(seed)
        self.clients: list[Client] = []
        self.busy_s = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._queue: list[tuple[int, Lease, Client]] = []
        self._prints = itertools.count(1)
        self._held: Counter[str] = Counter()
        self._outage = outage
        self._away = False
        if outage is not None:
            self._at(outage[0], self._goes_away)
            self._at(outage[0] + outage[1], self._is_back)
        for client in clients:
            self._joins(client)

    def run(self, until: float = float("inf")) -> Crowd:
        while self._events and self._events[0][0] < until:
            now, _, event = heapq.heappop(self._events)
            event(now)
            assert self.gate.rows <= 2 * self.gate.limits.places
        return self

    # What became of it ---------------------------------------------------------------------------------------------

    @property
    def served(self) -> list[Client]:
        return [client for client in self.clients if client.began is not None]

    def sent(self) -> list[int]:
        return sorted(client.sent for client in self.clients)

    def kept(self, *, first: bool = False) -> float:
        """The part of promises (of first ones) within half of the time until the client was let in."""
        pairs = [
            (told, client.entered - at)
            for client in self.served
            for at, told in client.told[: 1 if first else None]
            if client.entered is not None
        ]
        return sum(abs(told - true) <= 0.5 * true for told, true in pairs) / len(pairs)

    def goodput(self, start: float, end: float) -> float:
        return self.busy_s / (self.running * (end - start))

    # Events --------------------------------------------------------------------------------------------------------

    def _joins(self, client: Client) -> None:
        client.fingerprint = client.fingerprint or next(self._prints)
        self.clients.append(client)
        self._at(client.at, lambda now: self._comes(client, now))

    def _comes(self, client: Client, now: float) -> None:
        client.sent += 1
        arrival = Arrival(
            tenant=client.tenant,
            fingerprint=next(self._prints) if client.fresh else client.fingerprint,
            repeat=client.sent > 1 if client.counts else None,
            via=client.via,
        )
        try:
            self.gate.check_room(now, arrival)
            lease = self.gate.admit(
                rows=client.rows,
                tokens=client.tokens,
                now=now,
                service_s=client.expected_s,
                certain=client.certain,
                arrival=arrival,
            )
        except (Busy, EngineUnavailable) as error:
            self._refused(client, error, now)
            return
        client.entered = now
        for _ in range(client.rows):
            self._queue.append((next(self._numbers), lease, client))
        lease.give_way = lambda error: self._displaced(lease, client, error)
        self._at(now + lease.max_wait_s, lambda now: self._waited(lease, client, now))
        self._start(now)

    def _refused(self, client: Client, error: TreadleError, now: float) -> None:
        assert error.retry_after_s is not None
        client.entered = None
        client.told.append((now, error.retry_after_s))
        if client.sent == client.attempts:
            client.gave_up = True
            self._follow(client, now)
            return
        late_s = self.chance.uniform(0.0, client.late_s) if client.late_s else 0.0
        back = now + client.next_s(error.retry_after_s) + TRAVEL_S + late_s
        self._at(back, lambda now: self._comes(client, now))

    def _displaced(self, lease: Lease, client: Client, error: TreadleError) -> None:
        told = error.retry_after_s
        assert told is not None
        now = self._now
        self._take_back(lease, "cancelled", now)
        self._refused(client, error, now)

    def _waited(self, lease: Lease, client: Client, now: float) -> None:
        if not lease.began and any(entry[1] is lease for entry in self._queue):
            self._take_back(lease, "expired", now)
            reason = Refusal.ENGINE_UNAVAILABLE if self._away else Refusal.WAIT_OVER
            self._refused(client, self.gate.postpone(lease, reason, now), now)
            self._start(now)

    def _take_back(self, lease: Lease, outcome: str, now: float) -> None:
        for entry in [entry for entry in self._queue if entry[1] is lease]:
            self._queue.remove(entry)
            self._at(now, lambda now: self.gate.release(lease, outcome, now))

    def _start(self, now: float) -> None:
        while self._queue and not self._away and sum(self._held.values()) < self.running:
            entry = min(self._queue, key=lambda entry: (not entry[1].began, self._held[entry[2].tenant], entry[0]))
            self._queue.remove(entry)
            _, lease, client = entry
            client.began = now if client.began is None else client.began
            self._held[client.tenant] += 1
            self.gate.started(lease, 0.0, now)
            took_s = client.service_s * self.chance.uniform(1 - self.jitter, 1 + self.jitter)
            self.busy_s += took_s
            self._at(now + took_s, lambda now, lease=lease, client=client, at=now: self._ends(lease, client, at, now))  # type: ignore[misc]

    def _goes_away(self, now: float) -> None:
        assert self._outage is not None
        self._away, expected = True, now + self._outage[2]
        for entry in self.gate._capacity.forecast._leases:
            entry.interrupted = True
        late = lambda: max(1.0, expected - self._now if expected > self._now else self._now - expected)  # noqa: E731
        self.gate.close(EngineUnavailable("restarting"), back_s=late, now=now)

    def _is_back(self, now: float) -> None:
        self._away = False
        self.gate.open_(self.gate.limits, now)
        self._start(now)

    def _lost_s(self, began: float, now: float) -> float:
        """How much of that time the engine was away."""
        if self._outage is None:
            return 0.0
        start, length, _ = self._outage
        return max(0.0, min(now, start + length) - max(began, start))

    def _ends(self, lease: Lease, client: Client, began: float, now: float, made_up_s: float = 0.0) -> None:
        lost_s = self._lost_s(began, now)
        if lost_s > made_up_s:
            self._at(now + lost_s - made_up_s, lambda now: self._ends(lease, client, began, now, lost_s))
            return
        self._held[client.tenant] -= 1
        self.gate.release(lease, "stop", now)
        self._start(now)
        if not lease.rows:
            self._follow(client, now)

    def _follow(self, client: Client, now: float) -> None:
        follower = self.after(client, now)
        if follower is not None:
            client.last = False
            self._joins(follower)

    def _at(self, at: float, event: Callable[[float], None]) -> None:
        def then(now: float) -> None:
            self._now = now
            event(now)

        heapq.heappush(self._events, (at, next(self._numbers), then))
