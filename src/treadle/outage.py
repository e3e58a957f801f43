"""The expected end of an outage, for `Retry-After`."""

from __future__ import annotations

from collections.abc import Callable

FIRST_LOAD_S = 2.0  # expected time of a load before one was measured
LONGEST_GUESS_S = 30.0  # limit of the estimate for an end that is late
SHORTEST_S = 1.0


class Outage:
    """Expected end of the outages of one process."""

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
