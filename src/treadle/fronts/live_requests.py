"""Live requests by their ids, for cancels, and cancels that came before their request.

Each tenant has ids of its own: a client can neither cancel nor block another tenant's request by its id, nor learn that
it exists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from ..core.messages import CancelReason
from ..engine.reservation import Reservation
from ..errors import InvalidRequest, RequestCancelled

_T = TypeVar("_T")

MAX_REQUEST_ID_CHARS = 512
EARLY_S = 30.0
MOST_EARLY = 10_000
MOST_ABORTED = 1024
ABORT_BYTES = MOST_ABORTED * 2 * MAX_REQUEST_ID_CHARS
"""Longest message of an Abort."""


class LiveRequest:
    """One live request. `aborted` is set by a cancel, which may come before there is anything to cancel."""

    def __init__(self) -> None:
        self.aborted = False
        self._preparing: asyncio.Timeout | None = None
        self._reservation: Reservation | None = None

    async def preparing(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `work` does, which an abort ends. Raises RequestCancelled."""
        if not self.aborted:
            self._preparing = asyncio.timeout(None)
            try:
                async with self._preparing:
                    return await work()
            except TimeoutError:
                if not self._preparing.expired():
                    raise
            finally:
                self._preparing = None
        raise RequestCancelled("the request was aborted")

    def hold(self, reservation: Reservation) -> None:
        """Set the reservation that an abort cancels."""
        self._reservation = reservation

    def abort(self) -> None:
        """Cancel the request. Idempotent, never blocks."""
        if self._preparing is not None and not self.aborted:
            self._preparing.reschedule(asyncio.get_running_loop().time())
        self.aborted = True
        if self._reservation is not None:
            self._reservation.cancel(CancelReason.CLIENT)


class LiveRequests:
    """Live requests of one front. Lives on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[tuple[str, bytes], list[LiveRequest]] = {}
        self._early: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @contextlib.contextmanager
    def exclusive(self, request_id: str, tenant: bytes = b"") -> Iterator[LiveRequest]:
        """Context manager of the request of `tenant` with this id. Raises InvalidRequest while another of its requests
        has the id. A cancel within the last EARLY_S seconds counts."""
        key = (request_id, tenant)
        if key in self._live:
            raise InvalidRequest(
                f"a request with the id '{request_id[:80]}' is still running: give each request its own",
                param="request_id",
            )
        with self.shared((request_id,), tenant) as request:
            request.aborted = self._was_early(key)
            yield request

    @contextlib.contextmanager
    def shared(self, request_ids: Sequence[str], tenant: bytes = b"") -> Iterator[LiveRequest]:
        """Context manager of a request of `tenant` with several ids, which other requests may have too."""
        request = LiveRequest()
        keys = [(request_id, tenant) for request_id in dict.fromkeys(request_ids)]
        for key in keys:
            self._live.setdefault(key, []).append(request)
        self._count += 1
        try:
            yield request
        finally:
            self._count -= 1
            for key in keys:
                self._live[key].remove(request)
                if not self._live[key]:
                    del self._live[key]

    def cancel(self, request_id: str, tenant: bytes = b"", *, all_tenants: bool = False) -> int:
        """Cancel the requests of `tenant` with this id, or with `all_tenants` of all; return their number."""
        found = [*self._live.get((request_id, tenant), ())]
        if all_tenants:
            found += self._foreign(tenant).get(request_id, ())
        for request in found:
            request.abort()
        return len(found)

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
            requests = [*foreign.get(request_id, ()), *self._live.get(key, ())]
            for request in requests:
                request.abort()
            if not requests and len(request_id) <= MAX_REQUEST_ID_CHARS:
                self._early.pop(key, None)
                self._early[key] = now
        self._forget(now)

    def _foreign(self, tenant: bytes) -> dict[str, list[LiveRequest]]:
        """Return the live requests of other tenants, by id."""
        found: dict[str, list[LiveRequest]] = {}
        for (request_id, other), requests in self._live.items():
            if other != tenant:
                found.setdefault(request_id, []).extend(requests)
        return found

    def _was_early(self, key: tuple[str, bytes]) -> bool:
        self._forget(self._clock())
        return self._early.pop(key, None) is not None

    def _forget(self, now: float) -> None:
        while self._early and (len(self._early) > MOST_EARLY or now - next(iter(self._early.values())) > EARLY_S):
            self._early.popitem(last=False)
