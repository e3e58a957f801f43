"""Timeouts of an owner, and the expected end of an outage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RELOAD_S = 60.0
RELOAD_TIMES = 5.0
FIRST_LOAD_S = 2.0  # expected time of a load before one was measured
LONGEST_GUESS_S = 30.0  # limit of the estimate for a load that is late
SHORTEST_S = 1.0


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds."""

    hang_after_s: float = 30.0
    start_timeout_s: float = 1800.0

    def load_timeout_s(self, measured_s: float | None) -> float:
        """Return the time limit of each stage of a load. `measured_s`: duration of the last load, None if there was
        none."""
        if measured_s is None:
            return self.start_timeout_s
        return min(self.start_timeout_s, max(RELOAD_S, RELOAD_TIMES * measured_s))


class Outage:
    """Expected end of an outage, for `Retry-After`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._over_at = clock() + FIRST_LOAD_S

    def expect(self, seconds: float) -> None:
        """Expect the outage to last `seconds` from now: back-off and load."""
        self._over_at = self._clock() + seconds

    def left_s(self) -> float:
        """Return the expected seconds left, at least SHORTEST_S. An outage that is late is expected to last as long
        again as it is late, at most LONGEST_GUESS_S."""
        left_s = self._over_at - self._clock()
        return max(SHORTEST_S, left_s if left_s > 0 else min(-left_s, LONGEST_GUESS_S))
