"""Look-ups of host names in daemon threads, of which there are few.

The system's look-up can't be cancelled: it goes on when nobody waits for it any more, up to minutes. In the event
loop's own threads it would hold up whatever else is done there, and the end of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ...errors import Busy
from ...host_names import addresses_of

MOST = 64
MOST_EACH = 16

Resolve = Callable[[str, int], Sequence[str]]


class NameLookups:
    """Look-ups by `resolve`, at most MOST at once, of which one tenant has up to MOST_EACH: those that nobody waits for
    any more count until they end. Lives on the event loop."""

    def __init__(self, resolve: Resolve = addresses_of) -> None:
        self._resolve = resolve
        self._held: Counter[str] = Counter()

    async def look_up(self, host: str, port: int, tenant: str = "") -> Sequence[str]:
        """Return the addresses of a name. Raises what `resolve` raises, and Busy."""
        if self._held.total() >= MOST or self._held[tenant] >= MOST_EACH:
            busy = "the server is busy: too many names of hosts are looked up; try again in about 1 s"
            raise Busy(busy, retry_after_s=1.0)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[str]] = loop.create_future()
        self._held[tenant] += 1

        def end(result: Sequence[str], error: Exception | None) -> None:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
            if found.done():  # cancelled
                return
            if error is None:
                found.set_result(result)
            else:
                found.set_exception(error)

        def run() -> None:
            result: Sequence[str] = ()
            failed: Exception | None = None
            try:
                result = self._resolve(host, port)
            except Exception as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, result, failed)

        threading.Thread(target=run, name="look-up of a host", daemon=True).start()
        return await found
