"""Sampler of the event loop's lag: the delay of timed wake-ups (R7)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

INTERVAL_S = 0.05
WINDOW = 1200  # samples: the last minute


class LoopLag:
    """Samples of the event loop's lag. `run` is the sampling task; `summary` is shown in `/v1/status`."""

    def __init__(self, report: Callable[[float], None], *, interval_s: float = INTERVAL_S) -> None:
        self._report = report
        self._interval_s = interval_s
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def note(self, lag_s: float) -> None:
        self._samples.append(lag_s)
        self._report(lag_s)

    def summary(self) -> dict[str, float]:
        """Return percentiles over the last minute, in milliseconds."""
        ordered = sorted(self._samples)
        if not ordered:
            return {"samples": 0.0, "p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
        last = len(ordered) - 1
        return {
            "samples": float(len(ordered)),
            "p50_ms": round(ordered[last // 2] * 1e3, 3),
            "p99_ms": round(ordered[round(last * 0.99)] * 1e3, 3),
            "max_ms": round(ordered[-1] * 1e3, 3),
        }

    async def run(self) -> None:
        """Sample every `interval_s` seconds until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.note(max(0.0, loop.time() - due))
