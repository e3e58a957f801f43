"""Prometheus counters of statistics that each owner counts from 0."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry, Counter


class StatisticsCounters:
    """Counters of the fields of some statistics. Each of `fields` is a field's name, its unit, and what it counts;
    metrics are called `prefix` and the unit, and `subject` stands before what they count."""

    def __init__(
        self, registry: CollectorRegistry, prefix: str, subject: str, fields: Iterable[tuple[str, str, str]]
    ) -> None:
        self._counters = {
            name: Counter(f"{prefix}_{unit}", f"{subject}: {about}", registry=registry) for name, unit, about in fields
        }

    def step(self, before: msgspec.Struct, now: msgspec.Struct) -> None:
        """Take over the statistics of a step; `before` are those of the one before."""
        for name, counter in self._counters.items():
            counter.inc(increase(getattr(before, name), getattr(now, name)))


def increase(before: float, now: float) -> float:
    """Return the increase of an owner's counter. A smaller value comes from a new owner, counting from 0."""
    return now - before if now >= before else now
