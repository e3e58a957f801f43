"""Turns at something of which few can be under way at once: fair between tenants, and with a limited wait."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...errors import Busy


class FairTurns:
    """At most `most` turns at once, of which one tenant has up to `each`. Who waits longer than `max_wait_s` is refused
    with Busy, whose message begins with `reason`."""

    def __init__(self, most: int, each: int, max_wait_s: float, reason: str) -> None:
        self._most = most
        self._each = each
        self._max_wait_s = max_wait_s
        self._reason = reason
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a turn of `tenant`. Raises Busy."""
        await self._begin(tenant)
        try:
            yield
        finally:
            self._end(tenant)

    def refusal(self) -> Busy:
        """Return the refusal of who has waited too long."""
        return Busy(f"{self._reason}; try again in about 1 s", retry_after_s=1.0)

    async def _begin(self, tenant: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        self._grant()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except BaseException as error:
            self._leave(tenant, granted)
            if isinstance(error, TimeoutError):
                raise self.refusal() from None
            raise

    def _leave(self, tenant: str, granted: asyncio.Future[None]) -> None:
        """Forget one that has stopped waiting, or has its turn but does not take it."""
        if not granted.cancelled():
            self._end(tenant)
            return
        queue = self._waiting.get(tenant, deque())
        if granted in queue:
            queue.remove(granted)
        if not queue:
            self._waiting.pop(tenant, None)

    def _end(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()

    def _grant(self) -> None:
        """Give free turns to those who wait, to one of each tenant after the other."""
        while self._held.total() < self._most:
            tenant = next((one for one in self._waiting if self._held[one] < self._each), None)
            if tenant is None:
                return
            queue = self._waiting.pop(tenant)
            granted = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind all others
            if not granted.cancelled():
                granted.set_result(None)
                self._held[tenant] += 1
