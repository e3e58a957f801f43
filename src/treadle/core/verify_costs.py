"""Seconds of decode steps, plain and with draft tokens to verify: measured in the warm-up, and corrected live."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache

from msgspec.structs import replace

from .capabilities import StepCost

WARM_UP = 0.25  # weight of the warm-up, in steps of the server
FORGET = 0.9  # weight of the past against each new step; the first ones are averaged
OUTLIER = 3.0  # a step counts as at most so many times what was expected, or that part of it


class VerifyCosts:
    """Costs of steps in which `rows` sequences decode: `plain` ones, and `verifying` ones with draft tokens.

    A step takes no longer than one of as many rows and tokens or more, nor than several with a part of its tokens that
    make up for it: where one was measured so, the machine was busy.
    Costs between measured ones are interpolated, by the draft tokens of a number of rows and then by the rows. Beyond
    the largest ones they grow as they did last. A number of rows of which only one was measured, as the time was over,
    tells nothing of what drafts cost beside others that do. Two scales follow the steps of the server, whose sequences
    are longer than those of the warm-up, and whose host and device may have more to do.
    """

    def __init__(self, plain: Iterable[StepCost], verifying: Iterable[StepCost]) -> None:
        self._plain = cache(_Line([(cost.rows, cost.seconds) for cost in _least(tuple(plain))]).at)
        drafts: dict[int, list[tuple[int, float]]] = {}
        for cost in _least(tuple(verifying)):
            drafts.setdefault(cost.rows, []).append((cost.tokens - cost.rows, cost.seconds))
        telling = [rows for rows, points in drafts.items() if len(points) > 1]
        self._rows = sorted(telling or drafts)
        self._lines = [_Line(drafts[rows]) for rows in self._rows]
        self._verifying = cache(self._interpolated)
        self._plain_scale = _Scale()
        self._verifying_scale = _Scale()

    @property
    def scale(self) -> float:
        """What `ratio` is to be multiplied by, as the server's steps are not those of the warm-up."""
        return self._plain_scale.value / self._verifying_scale.value

    def ratio(self, rows: int, drafts: int) -> float:
        """Return the seconds of a plain step over those of one that verifies `drafts` tokens, in the warm-up."""
        return self._plain(rows) / self._verifying(rows, drafts)

    def plain_s(self, rows: int) -> float:
        """Return the expected seconds of a plain step."""
        return self._plain_scale.value * self._plain(rows)

    def verifying_s(self, rows: int, drafts: int) -> float:
        """Return the expected seconds of a step that verifies `drafts` tokens in all."""
        return self._verifying_scale.value * self._verifying(rows, drafts)

    def refill_s(self, rows: int) -> float:
        """Return the expected seconds that a plain step takes longer where none is in flight before it."""
        return max(0.0, self.verifying_s(rows, 0) - self.plain_s(rows))

    def observe_plain(self, rows: int, seconds: float) -> None:
        """Learn from a plain step."""
        self._verifying_scale.follow(self._plain_scale.observe(seconds, self._plain(rows)))

    def observe_verifying(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn from a step that verified `drafts` tokens in all."""
        self._plain_scale.follow(self._verifying_scale.observe(seconds, self._verifying(rows, drafts)))

    def _interpolated(self, rows: int, drafts: int) -> float:
        return _between(self._rows, rows, lambda i: self._lines[i].at(drafts))


def _least(costs: Collection[StepCost]) -> list[StepCost]:
    """Return the costs, each as low as the lowest of those with at least its rows and tokens, and as that of as many
    steps of fewer tokens of its rows."""

    def least(one: StepCost) -> float:
        larger = [other.seconds for other in costs if other.rows >= one.rows and other.tokens >= one.tokens]
        parts = [
            -(-one.tokens // other.tokens) * other.seconds
            for other in costs
            if other.rows == one.rows and other.tokens < one.tokens
        ]
        return min(larger + parts)

    return [replace(one, seconds=least(one)) for one in costs]


class _Scale:
    """The server's seconds over those of the warm-up, which count as a part of a step. What makes steps of the other
    kind slower or faster does so with these, unless they were seen a moment ago."""

    def __init__(self) -> None:
        self.value = 1.0
        self._weight = WARM_UP
        self._known = 0.0

    def observe(self, seconds: float, expected: float) -> float:
        """Learn from a step. Return how the scale has changed."""
        before, self._known = self.value, 1.0
        ratio = min(max(seconds / expected, before / OUTLIER), before * OUTLIER)
        self._weight = FORGET * self._weight + 1
        self.value += (ratio - before) / self._weight
        return self.value / before

    def follow(self, change: float) -> None:
        """Take over a change of the other scale, the more the longer these steps were not seen."""
        self.value *= change ** (1 - self._known)
        self._known *= FORGET


class _Line:
    """Seconds by a number, linear between the known ones."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        ordered = sorted(points)
        self._at = [at for at, _ in ordered]
        self._seconds = [seconds for _, seconds in ordered]

    def at(self, number: int) -> float:
        return _between(self._at, number, self._seconds.__getitem__)


def _between(at: Sequence[int], number: int, seconds: Callable[[int], float]) -> float:
    """Return the seconds at `number`, given those at each of the ascending numbers in `at`, by index. They are constant
    below the first one."""
    if number <= at[0] or len(at) == 1:
        return seconds(0)
    right = min(bisect_right(at, number), len(at) - 1)
    low, high = seconds(right - 1), seconds(right)
    slope = (high - low) / (at[right] - at[right - 1])
    if number > at[right]:
        return high + max(0.0, slope) * (number - at[right])
    return low + slope * (number - at[right - 1])
