"""Resources at quiet points, and the rule that says whether they drift.

A quiet point is a moment at which no client is connected and every place is free. The first quarter of a process's
quiet points is its warm-up: pools and caches fill. Of the rest, the median of the second half may exceed the median of
the first by PART, or by what `SLACK` allows for its unit: fewer than four points each are too few to judge.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PART = 0.02
SLACK = {"rss": 1 << 20, "fds": 2, "threads": 1}
SHOWN_ALONE = ("pss",)  # falls and rises with other processes that map the same libraries
LEAST_POINTS = 8


@dataclass(frozen=True)
class Drift:
    """From which median to which a figure went."""

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
        slack = math.inf if unit in SHOWN_ALONE else SLACK.get(unit, 0)
        return self.points >= LEAST_POINTS and self.after - self.before > max(PART * self.before, slack)

    def __str__(self) -> str:
        went = f"{self.before:,.0f} to {self.after:,.0f} ({self.part:+.1%})"
        few = "" if self.points >= LEAST_POINTS else ", too few to judge"
        return f"{self.name}: {went} over {self.points} quiet points{few}"


def drift(name: str, values: Sequence[float]) -> Drift | None:
    """How a figure drifted over its quiet points; None where there are too few to say anything."""
    settled = list(values[len(values) // 4 :])
    if len(settled) < 2:
        return None
    half = len(settled) // 2
    return Drift(name, statistics.median(settled[:half]), statistics.median(settled[half:]), len(settled))
