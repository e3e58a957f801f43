"""Drift of resources over quiet points.

A quiet point is a moment at which no client is connected and every slot is free. The first quarter of a process's quiet
points is its warm-up: pools and caches fill. Of the rest, the median of the second half may exceed the median of the
first by PART, or by the `SLACK` of its unit: fewer than LEAST_POINTS points are too few to judge.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PART = 0.02
SLACK = {"rss": 1 << 20, "fds": 2, "threads": 1}
NOT_JUDGED = ("pss",)  # falls and rises with other processes that map the same libraries
LEAST_POINTS = 8


@dataclass(frozen=True)
class Drift:
    """Medians of a figure over the first and the second half of its quiet points."""

    name: str
    before: float
    after: float
    points: int

    @property
    def part(self) -> float:
        return self.after / self.before - 1 if self.before else 0.0

    @property
    def bad(self) -> bool:
        unit = self.name.rpartition(" ")[2]
        slack = math.inf if unit in NOT_JUDGED else SLACK.get(unit, 0)
        return self.points >= LEAST_POINTS and self.after - self.before > max(PART * self.before, slack)

    def __str__(self) -> str:
        change = f"{self.before:,.0f} to {self.after:,.0f} ({self.part:+.1%})"
        few = "" if self.points >= LEAST_POINTS else ", too few to judge"
        return f"{self.name}: {change} over {self.points} quiet points{few}"


def drift(name: str, values: Sequence[float]) -> Drift | None:
    """Compute a figure's drift over its quiet points; None if there are too few."""
    settled = list(values[len(values) // 4 :])
    if len(settled) < 2:
        return None
    half = len(settled) // 2
    return Drift(name, statistics.median(settled[:half]), statistics.median(settled[half:]), len(settled))
