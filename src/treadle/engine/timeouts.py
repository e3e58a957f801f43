"""Bounds on an owner's silence, and how long an outage is expected to last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RELOAD_S = 60.0
RELOAD_TIMES = 5.0
FIRST_LOAD_S = 2.0  # how long a load is expected to take that was never measured
LONGEST_GUESS_S = 30.0  # of a load that takes longer than expected: as long again as it is late, at most this
SHORTEST_S = 1.0


@dataclass(frozen=True)
class Timeouts:
    """Bounds in seconds."""

    hang_after_s: float = 30.0
    start_timeout_s: float = 1800.0

    def load_s(self, measured_s: float | None) -> float:
        """How long a load may go on without telling of another stage; `measured_s` is how long the last one took."""
        if measured_s is None:
            return self.start_timeout_s
        return min(self.start_timeout_s, max(RELOAD_S, RELOAD_TIMES * measured_s))


class Outage:
    """When the engine is expected to take work (again), for `Retry-After`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._over_at = clock() + FIRST_LOAD_S

    def lasts(self, seconds: float) -> None:
        """It begins now, or goes on, for about `seconds`: back-off and load."""
        self._over_at = self._clock() + seconds

    def left_s(self) -> float:
        """Seconds that are left, SHORTEST_S at least. One that is late is expected to last as long again as it is
        late."""
        left_s = self._over_at - self._clock()
        return max(SHORTEST_S, left_s if left_s > 0 else min(-left_s, LONGEST_GUESS_S))
