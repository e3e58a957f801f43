"""Metrics of speculative decoding."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from ..core.statistics import SpeculationStatistics


class SpeculationMetrics:
    """Counts draft tokens, and shows whether they are verified."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = {
            name: Counter(f"treadle_draft_{unit}", f"Speculation: {about}", registry=registry)
            for name, unit, about in (
                ("steps", "steps", "steps that verified draft tokens"),
                ("rows", "verifications", "sequences that had draft tokens verified, once a step"),
                ("drafted", "tokens", "draft tokens verified"),
                ("accepted", "accepted_tokens", "draft tokens accepted"),
            )
        }
        self._on = Gauge("treadle_speculating", "Speculation: whether draft tokens are verified", registry=registry)

    def step(self, before: SpeculationStatistics, now: SpeculationStatistics) -> None:
        """Take over the statistics of a step; `before` are those of the one before, in the same engine."""
        if now == before:
            return
        for name, counter in self._counters.items():
            counter.inc(max(0, getattr(now, name) - getattr(before, name)))
        self._on.set(now.on)
