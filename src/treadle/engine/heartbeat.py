"""Heartbeat of an owner: when it was last heard, and whether its silence means that it hangs.

An owner that owes work must be heard within `hang_after_s`. One that owes nothing is asked for a Pong whenever it has
been silent for `ping_s`, and must answer so soon that a hang shows within `hang_after_s` of its last word. Where this
process itself stood still (it was stopped, or its container frozen), the owner's silence counts from the awakening.
"""

from __future__ import annotations

from collections.abc import Callable

STOOD_STILL_S = 1.0  # a look that comes later than this, and by half of `hang_after_s`, says that we stood still
PING_S = 5.0
PINGS_PER_HANG = 4  # a ping at least so often within `hang_after_s`


class Heartbeat:
    """One owner's at a time: `reset` begins another's."""

    def __init__(self, hang_after_s: float, clock: Callable[[], float]) -> None:
        self.hang_after_s = hang_after_s
        self.ping_s = min(PING_S, hang_after_s / PINGS_PER_HANG)
        self.last: float | None = None
        self._clock = clock
        self._awake = clock()
        self._pinged: float | None = None

    def reset(self) -> None:
        """A new owner begins its life."""
        self.last = self._pinged = None
        self._awake = self._clock()

    def heard(self) -> float:
        """A message of any kind has come; returns the time."""
        self.last = now = self._clock()
        self._pinged = None
        return now

    def looked(self, late_s: float) -> None:
        """The watcher looked `late_s` seconds after it meant to."""
        if late_s > max(STOOD_STILL_S, self.hang_after_s / 2):
            self._awake = self._clock()

    def silent_s(self, since: float) -> float:
        """Seconds without a word, of those after `since`."""
        return self._clock() - max(since, self.last or since, self._awake)

    def wants_ping(self) -> bool:
        """Whether an idle owner is to be asked now; notes that it was."""
        if self._pinged is not None or self.silent_s(self._awake) < self.ping_s:
            return False
        self._pinged = self._clock()
        return True

    def deaf_s(self) -> float:
        """Seconds without a word in spite of a ping, if they are too many; else 0."""
        if self._pinged is None:
            return 0.0
        silent_s = self.silent_s(self._awake)
        answered_late = self._clock() - max(self._pinged, self._awake) > self.hang_after_s - self.ping_s
        return silent_s if answered_late else 0.0
