"""Metrics of SpecPrefill."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from ..core.statistics import SpecPrefillStatistics
from .counters import StatisticsCounters

_FIELDS = (
    ("prompts", "prompts", "prompts that were prefilled in part"),
    ("scored_tokens", "scored_tokens", "tokens of these that were scored"),
    ("kept_tokens", "kept_tokens", "tokens of these that were kept of the scored ones"),
    ("failed", "failed_prompts", "prompts that could not be scored, and were prefilled whole"),
    ("scoring_s", "scoring_seconds", "seconds of steps that were spent on scoring"),
)


class SpecPrefillMetrics:
    """Counts prompts that are prefilled in part."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = StatisticsCounters(registry, "treadle_spec_prefill", "SpecPrefill", _FIELDS)

    def step(self, before: SpecPrefillStatistics, now: SpecPrefillStatistics) -> None:
        """Take over the statistics of a step; `before` are those of the one before, in the same engine."""
        if now != before:
            self._counters.step(before, now)
