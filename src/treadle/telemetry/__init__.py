"""What the server says about itself: metrics, structured logs and the event loop's lag."""

from __future__ import annotations

import asyncio

from .access import AccessLines
from .lag import LoopLag
from .metrics import Metrics


class Telemetry:
    """One server's telemetry: `metrics` observes the engine client, `access` writes the access log, and `run()` is a
    task for its event loop. `log_client` shows clients' addresses in the access log."""

    def __init__(self, *, log_client: bool = False) -> None:
        self.metrics = Metrics()
        self.access = AccessLines(show_client=log_client)
        self.lag = LoopLag(self.metrics.loop_lag)

    async def run(self) -> None:
        """Sample the event loop's lag and end the access log's windows, until cancelled."""
        await asyncio.gather(self.lag.run(), self.access.run())
