"""Metrics of speculative decoding."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from ..core.statistics import SpeculationStatistics
from .counters import StatisticsCounters

_FIELDS = (
    ("steps", "steps", "steps that verified draft tokens"),
    ("rows", "verifications", "sequences that had draft tokens verified, once a step"),
    ("drafted", "tokens", "draft tokens verified"),
    ("accepted", "accepted_tokens", "draft tokens accepted"),
)


class SpeculationMetrics:
    """Counts draft tokens, and shows whether they are verified."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = StatisticsCounters(registry, "treadle_draft", "Speculation", _FIELDS)
        self._on = Gauge("treadle_speculating", "Speculation: whether draft tokens are verified", registry=registry)

    def step(self, before: SpeculationStatistics, now: SpeculationStatistics) -> None:
        """Take over the statistics of a step; `before` are those of the one before, in the same engine."""
        if now != before:
            self._counters.step(before, now)
            self._on.set(now.on)
