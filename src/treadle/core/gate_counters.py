"""Counters of the gate: outcomes of requests since the start, counted by rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class GateCounters:
    """Counters that `/v1/status` shows."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    wait_sum_s: float = 0.0

    def waited(self, wait_s: float) -> None:
        """Count a row that got its slot after `wait_s` seconds in the queue."""
        bucket = next((i for i, top in enumerate(WAIT_BUCKETS_S) if wait_s <= top), len(WAIT_BUCKETS_S))
        self.waits[bucket] += 1
        self.wait_sum_s += wait_s

    def statistics(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        buckets = dict(zip([*map(str, WAIT_BUCKETS_S), "inf"], self.waits, strict=True))
        return {
            "accepted": self.accepted,
            "refused": dict(self.refused),
            "ended": dict(self.ended),
            "wait_s": {"count": sum(self.waits), "sum": round(self.wait_sum_s, 6), "buckets": buckets},
        }
