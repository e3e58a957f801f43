"""Live requests by the ids that clients gave them, and cancels that came before their request.

Each tenant has ids of its own: a client can neither abort nor block another tenant's request by its id, nor learn that
it exists.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from ...core.messages import CancelReason
from ...engine.reservation import Reservation
from ...errors import InvalidRequest
from .request import MAX_REQUEST_ID_CHARS

EARLY_S = 30.0
MOST_EARLY = 10_000
MOST_ABORTED = 1024
ABORT_BYTES = MOST_ABORTED * 2 * MAX_REQUEST_ID_CHARS
"""Longest message of an Abort."""


class Call:
    """One live request. `aborted` is set by an Abort that came before it had anything to cancel."""

    def __init__(self) -> None:
        self.aborted = False
        self._reservation: Reservation | None = None

    def hold(self, reservation: Reservation) -> None:
        """Set the reservation that an abort cancels."""
        self._reservation = reservation

    def abort(self) -> None:
        """Cancel the request. Idempotent, never blocks."""
        self.aborted = True
        if self._reservation is not None:
            self._reservation.cancel(CancelReason.CLIENT)


class LiveCalls:
    """Live requests of one server, of both wires. Lives on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[tuple[str, bytes], Call] = {}
        self._early: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    @contextlib.contextmanager
    def live(self, request_id: str, tenant: bytes = b"") -> Iterator[Call]:
        """Context manager of the call of `tenant` with this id. Raises InvalidRequest while another of its calls has
        the id."""
        key = (request_id, tenant)
        if key in self._live:
            raise InvalidRequest(
                f"a request with the id '{request_id[:80]}' is still running: give each request its own",
                param="request_id",
            )
        call = self._live[key] = Call()
        call.aborted = self._was_early(key)
        try:
            yield call
        finally:
            del self._live[key]

    def abort(self, request_ids: Sequence[str], tenant: bytes = b"", *, all_tenants: bool = False) -> None:
        """Cancel requests of `tenant`, or with `all_tenants` of all. Unknown ids are remembered for EARLY_S seconds:
        their request may be on its way. Raises InvalidRequest for more than MOST_ABORTED at once."""
        if len(request_ids) > MOST_ABORTED:
            raise InvalidRequest(
                f"request_ids has {len(request_ids)} ids: give at most {MOST_ABORTED} in one call", param="request_ids"
            )
        now = self._clock()
        foreign = self._foreign(tenant) if all_tenants else {}
        for request_id in request_ids:
            key = (request_id, tenant)
            calls = [*foreign.get(request_id, ()), *([self._live[key]] if key in self._live else [])]
            for call in calls:
                call.abort()
            if not calls and len(request_id) <= MAX_REQUEST_ID_CHARS:
                self._early.pop(key, None)
                self._early[key] = now
        self._forget(now)

    def _foreign(self, tenant: bytes) -> dict[str, list[Call]]:
        """Return the live calls of other tenants, by id."""
        found: dict[str, list[Call]] = {}
        for (request_id, other), call in self._live.items():
            if other != tenant:
                found.setdefault(request_id, []).append(call)
        return found

    def _was_early(self, key: tuple[str, bytes]) -> bool:
        self._forget(self._clock())
        return self._early.pop(key, None) is not None

    def _forget(self, now: float) -> None:
        while self._early and (len(self._early) > MOST_EARLY or now - next(iter(self._early.values())) > EARLY_S):
            self._early.popitem(last=False)
