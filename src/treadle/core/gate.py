"""The one door: decides on the event loop, at once and before any work is done, who comes in.

A visit takes rows (one per sequence) and tokens, and keeps them until the engine's terminal events give them back,
never because a client left. Nobody waits here: `enter` and `correct` admit or raise. The books are what
`/v1/status` shows (D3).

`Retry-After` is when a slot is expected to come free behind all who wait or were promised one (`forecast`). With
`by_forecast` a request that could only wait in vain is refused at once instead of after its longest wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import Busy, InvalidRequest, TreadleError
from .forecast import Forecast, Visit
from .refusals import Refusal

WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
UNANSWERED = ("expired", "unused", "quarantined")


@dataclass(frozen=True)
class GateLimits:
    """Places for `running` and `waiting` rows, the `tokens` all of them may reserve (0: not limited), and how long a
    row may wait, in seconds. `by_forecast`: only those may wait for whom a slot is expected within that time."""

    running: int
    waiting: int
    max_wait_s: float
    tokens: int = 0
    by_forecast: bool = False

    @property
    def places(self) -> int:
        return self.running + self.waiting


@dataclass(slots=True)
class _Books:
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    wait_sum_s: float = 0.0


class Gate:
    """Admission by count. Closed until `open_` is called; `close` says with which error to refuse. `on_refused` is told
    the reason of each refusal."""

    def __init__(
        self, limits: GateLimits, closed: TreadleError, on_refused: Callable[[Refusal], None] = lambda reason: None
    ) -> None:
        self.limits = limits
        self._on_refused = on_refused
        self._closed: TreadleError | None = closed
        self._back_s: Callable[[], float] | None = None
        self._rows = 0
        self._tokens = 0
        self._forecast = Forecast(limits.running)
        self._books = _Books()

    def open_(self, limits: GateLimits) -> None:
        self.limits = limits
        self._closed = None
        self._forecast.reset(limits.running)

    def close(self, error: TreadleError, *, back_s: Callable[[], float] | None = None) -> None:
        """Refuse everyone with `error`. `back_s` says in how many seconds it is expected to open again, for
        `Retry-After`."""
        self._closed = error
        self._back_s = back_s

    # Coming and going --------------------------------------------------------------------------------------------

    def enter(self, *, rows: int, tokens: int, now: float, service_s: float = 0.0, certain: bool = False) -> Visit:
        """Take `rows` places and about `tokens` tokens. A row is expected to hold its slot for `service_s` seconds (0:
        unknown), `certain` if the request itself allows no more.

        Raises the closing error, InvalidRequest for what could never fit, or Busy with `retry_after_s`.
        """
        self.check_open(now)
        if rows > self.limits.places:
            raise self._never(rows)
        if self.limits.tokens:
            tokens = min(tokens, self.limits.tokens)
        self._check_places(rows, now)
        if self.limits.tokens and self._tokens + tokens > self.limits.tokens:
            raise self._busy(Refusal.TOKENS, now, rows)
        self._rows += rows
        self._tokens += tokens
        self._books.accepted += rows
        visit = Visit(rows=rows, tokens=tokens, entered=now, service_s=service_s, certain=certain)
        self._forecast.enter(visit, now)
        return visit

    def check_open(self, now: float) -> None:
        """Raise the closing error while the door is closed."""
        if self._closed is not None:
            raise self._refusal(self._closed)

    def check_room(self, now: float) -> None:
        """Raise what `enter` would raise for the smallest request: the closing error, or Busy where it finds no place.
        Takes nothing."""
        self.check_open(now)
        self._check_places(1, now)

    def _check_places(self, rows: int, now: float) -> None:
        if self._rows + rows > self.limits.places:
            raise self._busy(Refusal.QUEUE_FULL, now, rows)
        if self.limits.by_forecast and self._forecast.hopeless(now, self.limits.max_wait_s):
            raise self._busy(Refusal.WAIT_TOO_LONG, now, rows)

    def correct(self, visit: Visit, *, tokens: int, now: float) -> None:
        """Replace the estimate by what was counted. Raises like `enter`; the visit keeps its estimate then."""
        others = self._tokens - visit.tokens
        limit = self.limits.tokens
        if limit and tokens > limit:
            self.refuse(Refusal.TOO_LONG)
            raise InvalidRequest(
                f"the request may come to {tokens} tokens and this server holds {limit}: ask for fewer"
            )
        if limit and tokens > visit.tokens and others + tokens > limit:
            raise self._busy(Refusal.TOKENS, now, visit.rows)
        self._tokens = others + tokens
        visit.tokens = tokens

    def started(self, visit: Visit, wait_s: float, now: float) -> None:
        """A row of `visit` got its slot, after `wait_s` seconds in the queue."""
        self._forecast.start(visit, now)
        bucket = next((i for i, top in enumerate(WAIT_BUCKETS_S) if wait_s <= top), len(WAIT_BUCKETS_S))
        self._books.waits[bucket] += 1
        self._books.wait_sum_s += wait_s

    def leave(self, visit: Visit, outcome: str, now: float) -> None:
        """One row of `visit` has ended: its place and its part of the tokens are free."""
        part = visit.tokens // visit.rows
        visit.rows -= 1
        visit.tokens -= part
        self._rows -= 1
        self._tokens -= part
        self._books.ended[outcome] += 1
        self._forecast.leave(visit, now, answered=outcome not in UNANSWERED)

    def refuse(self, reason: Refusal) -> None:
        """Count a refusal. The gate counts its own; its owner those of waits that are over."""
        self._books.refused[reason.value] += 1
        self._on_refused(reason)

    def stepped(self, ratio: float) -> None:
        """A step took `ratio` of a full step in the warm-up. Steps of a server that is not full tell nothing."""
        if self._rows >= self.limits.running:
            self._forecast.step(ratio)

    def retry_after_s(self, now: float, rows: int = 1) -> float:
        """When `rows` slots that are not yet promised are expected to be free, in seconds from now; promises them."""
        return self._forecast.promise(rows, now)

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

    def _refusal(self, closed: TreadleError) -> TreadleError:
        self.refuse(Refusal(closed.code))
        retry_after_s = closed.retry_after_s if self._back_s is None else self._back_s()
        return type(closed)(closed.message, retry_after_s=retry_after_s)

    def _never(self, rows: int) -> InvalidRequest:
        self.refuse(Refusal.TOO_MANY_ROWS)
        room = f"{self.limits.running} running and {self.limits.waiting} waiting"
        return InvalidRequest(
            f"the request asks for {rows} sequences (n times prompts) and this server holds {self.limits.places} "
            f"({room}): ask for fewer at a time",
            param="n",
        )

    def _busy(self, reason: Refusal, now: float, rows: int) -> Busy:
        self.refuse(reason)
        wait_s = self.retry_after_s(now, rows)
        return Busy(f"the server is busy: {self._why(reason)}; try again in about {wait_s:.1f} s", retry_after_s=wait_s)

    def _why(self, reason: Refusal) -> str:
        if reason is Refusal.TOKENS:
            return "the tokens of the requests at work leave no room for this one"
        if reason is Refusal.WAIT_TOO_LONG:
            return f"no slot is expected to come free within the {self.limits.max_wait_s:g} s that a request may wait"
        return "every slot and every place in the queue is taken"
