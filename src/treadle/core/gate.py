"""The one door: decides on the event loop, at once and before any work is done, who comes in.

A visit takes rows (one per sequence) and tokens, and keeps them until the engine's terminal events give them back,
never because a client left. Nobody waits here: `enter` and `correct` admit or raise. The books are what
`/v1/status` shows (D3).

`Retry-After` is when a place is expected to come free: departures have a measured rate, and each client that was
turned away is promised the next free place after those promised before it. Those for whom one turnover of all places is
not enough are told a little more than that, each something else. Only departures from full slots count, as the others
say how often clients come and not how fast they are served.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from ..errors import Busy, InvalidRequest, TreadleError

WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
FIRST_GUESS_S = 1.0
LONGEST_PROMISE_S = 600.0
SHORTEST_CLOSED_S = 1.0
SPREAD = 0.3
GOLDEN = 0.618034
DEPARTURES = 64
ENOUGH_DEPARTURES = 8


@dataclass(frozen=True)
class GateLimits:
    """Places for `running` and `waiting` rows, the `tokens` all of them may reserve (0: not limited), and how long a
    row may wait, in seconds."""

    running: int
    waiting: int
    max_wait_s: float
    tokens: int = 0

    @property
    def places(self) -> int:
        return self.running + self.waiting


@dataclass(slots=True, eq=False)
class Visit:
    """What one client request holds: `rows` not yet ended and their `tokens` together."""

    rows: int
    tokens: int
    entered: float


@dataclass(slots=True)
class _Books:
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    wait_sum_s: float = 0.0


class Gate:
    """Admission by count. Closed until `open_` is called; `close` says with which error to refuse."""

    def __init__(self, limits: GateLimits, closed: TreadleError) -> None:
        self.limits = limits
        self._closed: TreadleError | None = closed
        self._closed_until: float | None = None
        self._rows = 0
        self._tokens = 0
        self._departures: deque[float] = deque(maxlen=DEPARTURES)
        self._service_s = 0.0
        self._busy_since = 0.0
        self._promised = 0.0
        self._crowd = 0.0
        self._books = _Books()

    def open_(self, limits: GateLimits) -> None:
        self.limits = limits
        self._closed = None

    def close(self, error: TreadleError, *, until: float | None = None) -> None:
        """Refuse everyone with `error`. With `until`, when it is expected to open again, `Retry-After` counts down."""
        self._closed = error
        self._closed_until = until

    # Coming and going --------------------------------------------------------------------------------------------

    def enter(self, *, rows: int, tokens: int, now: float) -> Visit:
        """Take `rows` places and about `tokens` tokens.

        Raises the closing error, InvalidRequest for what could never fit, or Busy with `retry_after_s`.
        """
        self.check_open(now)
        if rows > self.limits.places:
            raise self._never(rows)
        if self.limits.tokens:
            tokens = min(tokens, self.limits.tokens)
        self._check_places(rows, now)
        if self.limits.tokens and self._tokens + tokens > self.limits.tokens:
            raise self._busy("tokens", now)
        if not self._rows:
            self._busy_since = now
        self._rows += rows
        self._tokens += tokens
        self._books.accepted += rows
        return Visit(rows=rows, tokens=tokens, entered=now)

    def check_open(self, now: float) -> None:
        """Raise the closing error while the door is closed."""
        if self._closed is not None:
            raise self._refusal(self._closed, now)

    def check_room(self, now: float) -> None:
        """Raise what `enter` would raise for the smallest request: the closing error, or Busy where all places are
        taken. Takes nothing."""
        self.check_open(now)
        self._check_places(1, now)

    def _check_places(self, rows: int, now: float) -> None:
        if self._rows + rows > self.limits.places:
            raise self._busy("queue_full", now)

    def correct(self, visit: Visit, *, tokens: int, now: float) -> None:
        """Replace the estimate by what was counted. Raises like `enter`; the visit keeps its estimate then."""
        others = self._tokens - visit.tokens
        limit = self.limits.tokens
        if limit and tokens > limit:
            self._books.refused["too_long"] += 1
            raise InvalidRequest(
                f"the request may come to {tokens} tokens and this server holds {limit}: ask for fewer"
            )
        if limit and tokens > visit.tokens and others + tokens > limit:
            raise self._busy("tokens", now)
        self._tokens = others + tokens
        visit.tokens = tokens

    def waited(self, wait_s: float) -> None:
        """A row began to run after `wait_s` seconds."""
        bucket = next((i for i, top in enumerate(WAIT_BUCKETS_S) if wait_s <= top), len(WAIT_BUCKETS_S))
        self._books.waits[bucket] += 1
        self._books.wait_sum_s += wait_s

    def leave(self, visit: Visit, outcome: str, now: float) -> None:
        """One row of `visit` has ended: its place and its part of the tokens are free."""
        full = self._rows >= self.limits.running
        part = visit.tokens // visit.rows
        visit.rows -= 1
        visit.tokens -= part
        self._rows -= 1
        self._tokens -= part
        self._books.ended[outcome] += 1
        if outcome == "expired":
            self._books.refused["wait_over"] += 1
        elif outcome != "unused":
            if full:
                self._departures.append(now)
            else:
                self._departures.clear()
            service_s = now - visit.entered
            self._service_s = service_s if not self._service_s else 0.8 * self._service_s + 0.2 * service_s

    # Retry-After -------------------------------------------------------------------------------------------------

    def retry_after_s(self, now: float) -> float:
        """When the next place that is not yet promised is expected to be free, in seconds from now; promises it."""
        pace = self._seconds_per_departure(now)
        soonest = self._soonest_s(now)
        turnover = min(pace * self.limits.places, LONGEST_PROMISE_S)
        latest = now + max(turnover, soonest + pace)
        self._promised = max(self._promised, now + soonest) + pace
        if self._promised <= latest:
            return self._promised - now
        self._promised = latest
        return (latest - now) * (1 + self._beyond())

    def _beyond(self) -> float:
        """How much later than the latest promise, as a part of it: those who are all told the same come as one crowd.
        Steps of the golden ratio spread any number of them evenly."""
        self._crowd = (self._crowd + GOLDEN) % 1.0
        return SPREAD * self._crowd

    def _seconds_per_departure(self, now: float) -> float:
        rows = max(1, self._rows)
        count = len(self._departures)
        if count > min(self.limits.running, ENOUGH_DEPARTURES):
            window = self._departures[-1] - self._departures[0]
            return max(window / (count - 1), self._service_s / rows / 2)
        return (self._service_s or self._guess_s(now)) / min(self.limits.running, rows)

    def _soonest_s(self, now: float) -> float:
        """What has to pass before the first place: nothing, unless none has come free for longer than it should."""
        if not self._service_s:
            return self._guess_s(now)
        last = self._departures[-1] if self._departures else now
        return max(0.0, now - last - self._service_s)

    def _guess_s(self, now: float) -> float:
        """How long a row may take, while none has ended: as long again as they have taken so far."""
        return max(FIRST_GUESS_S, now - self._busy_since)

    # What it says of itself ----------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def tokens(self) -> int:
        return self._tokens

    def statistics(self) -> dict[str, Any]:
        """Plain values: limits, what is taken, and every outcome since the start, rows counted one by one."""
        books = self._books
        buckets = dict(zip([*map(str, WAIT_BUCKETS_S), "inf"], books.waits, strict=True))
        return {
            "capacity": self.limits.running,
            "max_waiting": self.limits.waiting,
            "max_wait_s": self.limits.max_wait_s,
            "max_tokens_reserved": self.limits.tokens,
            "rows": self._rows,
            "tokens_reserved": self._tokens,
            "accepted": books.accepted,
            "refused": dict(books.refused),
            "ended": dict(books.ended),
            "wait_s": {"count": sum(books.waits), "sum": round(books.wait_sum_s, 6), "buckets": buckets},
        }

    def _refusal(self, closed: TreadleError, now: float) -> TreadleError:
        self._books.refused[closed.code] += 1
        retry_after_s = closed.retry_after_s
        if self._closed_until is not None:
            retry_after_s = max(SHORTEST_CLOSED_S, self._closed_until - now)
        return type(closed)(closed.message, retry_after_s=retry_after_s)

    def _never(self, rows: int) -> InvalidRequest:
        self._books.refused["too_many_rows"] += 1
        room = f"{self.limits.running} running and {self.limits.waiting} waiting"
        return InvalidRequest(
            f"the request asks for {rows} sequences (n times prompts) and this server holds {self.limits.places} "
            f"({room}): ask for fewer at a time",
            param="n",
        )

    def _busy(self, reason: str, now: float) -> Busy:
        self._books.refused[reason] += 1
        what = "every slot and every place in the queue is taken"
        if reason == "tokens":
            what = "the tokens of the requests at work leave no room for this one"
        wait_s = self.retry_after_s(now)
        return Busy(f"the server is busy: {what}; try again in about {wait_s:.1f} s", retry_after_s=wait_s)
