"""What the server says about itself: metrics, structured logs and the event loop's lag."""

from __future__ import annotations

from .lag import LoopLag
from .metrics import Metrics


class Telemetry:
    """One server's telemetry: `metrics` observes the engine client, `lag.run()` is a task for its event loop."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.lag = LoopLag(self.metrics.loop_lag)
