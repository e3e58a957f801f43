"""Telemetry: metrics, structured logs, access log, event-loop lag and watchdog."""

from __future__ import annotations

import asyncio

from .access_log import AccessLogWriter
from .loop_lag import LoopLag
from .metrics import Metrics
from .watchdog import Watchdog


class Telemetry:
    """Telemetry of one server.

    `metrics` observes the engine client, `access` writes the access log, and `run()` is a task of the event loop.
    `log_client` adds clients' addresses to the access log. `watchdog`, if given, is run as part of `run()`.
    """

    def __init__(self, *, log_client: bool = False, watchdog: Watchdog | None = None) -> None:
        self.metrics = Metrics()
        self.access = AccessLogWriter(show_client=log_client)
        self.lag = LoopLag(self.metrics.loop_lag)
        self._watchdog = watchdog

    async def run(self) -> None:
        """Sample the event loop's lag, close the access log's windows and feed the watchdog, until cancelled."""
        tasks = [self.lag.run(), self.access.run()]
        await asyncio.gather(*tasks, *([] if self._watchdog is None else [self._watchdog.run()]))
