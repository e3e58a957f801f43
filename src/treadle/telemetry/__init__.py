"""What the server says about itself: metrics, structured logs and the event loop's lag."""

from __future__ import annotations

import asyncio

from .access import AccessLines
from .loop_lag import LoopLag
from .metrics import Metrics
from .watchdog import Watchdog


class Telemetry:
    """One server's telemetry: `metrics` observes the engine client, `access` writes the access log, and `run()` is a
    task for its event loop. `log_client` shows clients' addresses in the access log. `watchdog` is run beside."""

    def __init__(self, *, log_client: bool = False, watchdog: Watchdog | None = None) -> None:
        self.metrics = Metrics()
        self.access = AccessLines(show_client=log_client)
        self.lag = LoopLag(self.metrics.loop_lag)
        self._watchdog = watchdog

    async def run(self) -> None:
        """Sample the event loop's lag, end the access log's windows and keep the watchdog quiet, until cancelled."""
        tasks = [self.lag.run(), self.access.run()]
        await asyncio.gather(*tasks, *([] if self._watchdog is None else [self._watchdog.run()]))
