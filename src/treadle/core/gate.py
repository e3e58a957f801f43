"""Gate: the admission controller. It admits or refuses a request on the event loop, at once, before any work is done.

A lease holds rows (one for each sequence) and tokens until the engine's terminal events return them; a client that
leaves returns nothing. Nothing waits here: `admit` and `resize` succeed or raise. `/v1/status` shows the counters (D3).

A refused request gets a ticket (`virtual_queue`): a place that is kept for it. `Retry-After` is when the place is
expected to be free (`admission_capacity`, `forecast`). Tickets outlive an outage of the engine: a client that returns
during one keeps its place, and gets a new time. When demand exceeds capacity, tenants hold equal parts (`fair_share`).
With `by_forecast`, a request that could only wait in vain is refused at once instead of after its longest wait.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ..errors import Busy, ContextLengthExceeded, InvalidRequest, TreadleError
from ..units import duration
from .admission_capacity import AdmissionCapacity
from .admission_capacity import GateLimits as GateLimits
from .fair_share import FairShares
from .finishes import over_capacity
from .forecast import Lease
from .gate_counters import GateCounters
from .refusals import Refusal, param_at_fault
from .virtual_queue import Arrival, Ticket, VirtualQueue

UNANSWERED = ("expired", "unused", "quarantined", "displaced", "lost")
REASONS = {
    Refusal.QUEUE_FULL: "every slot and every place in the queue is taken",
    Refusal.PROMISED: "the places that are left are promised to requests that came earlier",
    Refusal.DISPLACED: "this request's place in the queue went to a client that holds less than its share",
    Refusal.TOKENS: "the tokens of the requests at work leave no room for this one",
    Refusal.WAIT_TOO_LONG: "no slot is expected to come free within the {max_wait_s:g} s that a request may wait",
    Refusal.WAIT_OVER: "no slot came free within the time a request may wait",
}


def _new_id() -> str:
    return secrets.token_urlsafe(12)


class Gate:
    """Admission by counts of rows and tokens. The gate is closed until `open_`, and refuses with the error given to
    `close`. `on_refused` is called with the reason of each refusal; `new_id` returns unguessable ticket ids."""

    def __init__(
        self,
        limits: GateLimits,
        closed: TreadleError,
        on_refused: Callable[[Refusal], None] = lambda reason: None,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        self._on_refused = on_refused
        self._closed: TreadleError | None = closed
        self._back_s: Callable[[], float] | None = None
        self._shares = FairShares()
        self._virtual_queue = VirtualQueue(self._shares.held, new_id)
        self._capacity = AdmissionCapacity(limits, self._virtual_queue, self._shares)
        self._counters = GateCounters()

    @property
    def limits(self) -> GateLimits:
        return self._capacity.limits

    def open_(self, limits: GateLimits, now: float = 0.0) -> None:
        self._capacity.limits = limits
        self._capacity.forecast.reset(limits.running)
        self._closed = None
        since = self._capacity.forecast.resume(now)
        if since is not None:
            self._virtual_queue.shift(since, now)

    def close(self, error: TreadleError, *, back_s: Callable[[], float] | None = None, now: float = 0.0) -> None:
        """Refuse all requests with `error`. `back_s` returns the seconds until the gate is expected to open again:
        until then admitted requests stand still, and refused ones get tickets. Without it, tickets are of no use."""
        self._closed = error
        self._back_s = back_s
        if back_s is not None and self._capacity.forecast.pause(now, back_s):
            self._virtual_queue.hold()

    # Admission -------------------------------------------------------------------------------------------------

    def admit(
        self,
        *,
        rows: int,
        tokens: int,
        now: float,
        service_s: float = 0.0,
        certain: bool = False,
        arrival: Arrival | None = None,
        prompts: int = 1,
    ) -> Lease:
        """Take `rows` places and about `tokens` tokens for `arrival`. A row is expected to hold its slot for
        `service_s` seconds (0: unknown), `certain` if the request itself allows no more. The rows are `n` choices of
        each of `prompts` prompts.

        Raises InvalidRequest for a request that can never fit; Busy, or the closing error if the gate opens again,
        with `retry_after_s` and `ticket`.
        """
        arrival = arrival or Arrival()
        if self._closed is not None:
            raise self._closed_error(self._closed, arrival, rows, tokens, now)
        if rows > self.limits.places:
            raise self._never(rows, prompts)
        if self.limits.tokens:
            tokens = min(tokens, self.limits.tokens)
        self._take_place(arrival, rows, tokens, now)
        lease = Lease(rows, tokens, now, service_s, certain, arrival=arrival, asked=rows)
        lease.max_wait_s = self._capacity.patience_s(arrival, now)
        self._capacity.take(rows, tokens)
        self._counters.accepted += rows
        self._virtual_queue.admit(arrival, now)
        self._shares.enter(lease)
        self._virtual_queue.moved(arrival.tenant)
        self._capacity.forecast.enter(lease)
        return lease

    def check_open(self, now: float, lease: Lease | None = None) -> None:
        """Raise the closing error while the gate is closed. `lease`, which was admitted before, keeps its place in
        arrival order."""
        if self._closed is not None:
            raise (
                self._closed_for_good(self._closed)
                if lease is None
                else self.postpone(lease, Refusal(self._closed.code), now)
            )

    def check_room(self, now: float, arrival: Arrival | None = None) -> None:
        """Raise the closing error or Busy, as `admit` would for the smallest request, or for that of the ticket of
        `arrival`. Takes nothing."""
        arrival = arrival or Arrival()
        if self._closed is not None:
            raise self._closed_error(self._closed, arrival, None, 0, now)
        self._recognise(arrival, now)
        ticket = arrival.ticket
        rows, tokens = (ticket.rows, ticket.tokens) if ticket else (1, 0)
        reason = self._capacity.obstacle(arrival, rows, tokens, now)
        if reason is not None and not (reason is Refusal.QUEUE_FULL and self._capacity.who_gives_way(arrival, rows)):
            known = None if ticket is None or ticket.guessed else ticket.rows
            raise self._busy(reason, arrival, known, tokens, now)

    def _take_place(self, arrival: Arrival, rows: int, tokens: int, now: float) -> None:
        """Raise Busy unless there is a place for it, or displacing others makes one."""
        self._recognise(arrival, now)
        self._virtual_queue.saw(arrival, rows)
        reason = self._capacity.obstacle(arrival, rows, tokens, now)
        if reason is Refusal.QUEUE_FULL and (others := self._capacity.who_gives_way(arrival, rows)):
            for other in others:
                self._displace(other, now)
            reason = self._capacity.obstacle(arrival, rows, tokens, now)
        if reason is not None:
            raise self._busy(reason, arrival, rows, tokens, now)

    def _recognise(self, arrival: Arrival, now: float) -> None:
        self._virtual_queue.sweep(now)
        self._virtual_queue.recognise(arrival, now)

    def _displace(self, lease: Lease, now: float) -> None:
        """End the wait of `lease`; its client keeps its place in arrival order."""
        assert lease.give_way is not None
        self._shares.displace(lease)
        self._virtual_queue.moved(lease.arrival.tenant)
        self._capacity.displaced += lease.rows
        lease.give_way(self.postpone(lease, Refusal.DISPLACED, now))

    def resize(self, lease: Lease, *, tokens: int, now: float) -> None:
        """Replace the estimated tokens by the counted ones. Raises like `admit`; the lease keeps its estimate then."""
        others = self.tokens - lease.tokens
        limit = self.limits.tokens
        if limit and tokens > limit:
            self.refuse(Refusal.TOO_LONG)
            raise ContextLengthExceeded(over_capacity(tokens, limit))
        if limit and tokens > lease.tokens and others + tokens > limit:
            raise self._busy(Refusal.TOKENS, lease.arrival, lease.asked, tokens, now)
        self._capacity.tokens = others + tokens
        lease.tokens = tokens

    def started(self, lease: Lease, wait_s: float, now: float) -> None:
        """Record that a row of `lease` got its slot after `wait_s` seconds in the queue."""
        self._capacity.forecast.start(lease, now)
        self._counters.waited(wait_s)

    def release(self, lease: Lease, outcome: str, now: float) -> None:
        """Return the place of one row of `lease`, which has ended, and its part of the tokens."""
        part = lease.tokens // lease.rows
        lease.rows -= 1
        lease.tokens -= part
        self._capacity.rows -= 1
        self._capacity.displaced -= lease.displaced
        self._capacity.tokens -= part
        self._counters.ended[outcome] += 1
        self._shares.leave(lease)
        self._virtual_queue.moved(lease.arrival.tenant)
        self._capacity.forecast.leave(lease, now, answered=outcome not in UNANSWERED)

    def pass_on(self, lease: Lease, outcome: str, now: float) -> None:
        """Keep the place of a row of `lease`, which has ended, for the next sequence of its request."""
        lease.upcoming -= 1
        lease.vacant += 1
        self._counters.accepted += 1
        self._counters.ended[outcome] += 1
        self._capacity.forecast.vacate(lease, now)

    def stepped(self, ratio: float) -> None:
        """Record that a step took `ratio` times the warm-up's full step, for each token that a sequence gained. Only
        steps of a full server count."""
        if self.rows >= self.limits.running:
            self._capacity.forecast.step(ratio)

    # Refusals ----------------------------------------------------------------------------------------------------

    def refuse(self, reason: Refusal) -> None:
        """Count a refusal. The gate counts its own; its caller counts waits that ended."""
        self._counters.refused[reason.value] += 1
        self._on_refused(reason)

    def postpone(self, lease: Lease, reason: Refusal, now: float) -> TreadleError:
        """Return the error for a row of `lease` that got no slot: Busy, or the closing error while the engine is away.
        Its request keeps its place in arrival order; all rows of a lease get the same time."""
        if self._closed is not None and self._back_s is None:
            return self._closed_for_good(self._closed)
        ticket = lease.arrival.ticket
        if ticket is None or not ticket.in_line:
            return self._busy(reason, lease.arrival, lease.asked, lease.tokens, now)
        self.refuse(reason)
        return self._error(reason, ticket, ticket.back - now)

    def _busy(self, reason: Refusal, arrival: Arrival, rows: int | None, tokens: int, now: float) -> TreadleError:
        """Put the ticket of a refused `arrival` for `rows` rows (None: not known) into line, and return its error."""
        self.refuse(reason)
        ticket = self._virtual_queue.place(arrival, rows, tokens, now)
        return self._error(reason, ticket, self._capacity.promise(ticket, arrival, rows or 1, tokens, now))

    def _error(self, reason: Refusal, ticket: Ticket | None, wait_s: float) -> TreadleError:
        """Return the error of a refusal, with the time to return and the ticket that keeps the place."""
        error: TreadleError
        if self._closed is not None and reason == self._closed.code:
            error = type(self._closed)(self._closed.message, retry_after_s=wait_s)
        else:
            why = REASONS[reason].format(max_wait_s=self.limits.max_wait_s)
            error = Busy(f"the server is busy: {why}; try again in about {duration(wait_s)}", retry_after_s=wait_s)
        error.ticket = "" if ticket is None else ticket.id
        return error

    def _closed_error(
        self, closed: TreadleError, arrival: Arrival, rows: int | None, tokens: int, now: float
    ) -> TreadleError:
        """Return the closing error for `arrival`, with a ticket if the gate opens again."""
        if self._back_s is None:
            return self._closed_for_good(closed)
        self._recognise(arrival, now)
        ticket = arrival.ticket
        if rows is None and ticket is not None:
            rows, tokens = None if ticket.guessed else ticket.rows, ticket.tokens
        return self._busy(Refusal(closed.code), arrival, rows, tokens, now)

    def _closed_for_good(self, closed: TreadleError) -> TreadleError:
        """Return the closing error, without a ticket."""
        self.refuse(Refusal(closed.code))
        retry_after_s = closed.retry_after_s if self._back_s is None else self._back_s()
        return type(closed)(closed.message, retry_after_s=retry_after_s)

    def _never(self, rows: int, prompts: int) -> InvalidRequest:
        self.refuse(Refusal.TOO_MANY_ROWS)
        room = f"{self.limits.running} running and {self.limits.waiting} waiting"
        return InvalidRequest(
            f"the request asks for {rows} sequences (n times prompts) and this server holds {self.limits.places} "
            f"({room}): ask for fewer at a time",
            param=param_at_fault(prompts, self.limits.places),
        )

    # State -------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self._capacity.rows

    @property
    def tokens(self) -> int:
        return self._capacity.tokens

    def statistics(self, now: float = 0.0) -> dict[str, Any]:
        """Return limits, taken places, and outcomes since the start, counted by rows, as plain values."""
        return {
            "capacity": self.limits.running,
            "max_waiting": self.limits.waiting,
            "max_wait_s": self.limits.max_wait_s,
            "max_tokens_reserved": self.limits.tokens,
            "rows": self.rows,
            "sharers": len(self._shares),
            "tokens_reserved": self.tokens,
            "promises": self._virtual_queue.statistics(now),
            **self._counters.statistics(),
        }
