"""Heartbeat of an owner: the time of its last message, pings, and hang detection.

An owner with work must send a message within `hang_after_s` seconds. An idle one is pinged after `ping_s` seconds of
silence, and must answer within `hang_after_s` of its last message. If this process itself was suspended (stopped, or in
a frozen container), silence counts from its resumption.
"""

from __future__ import annotations

from collections.abc import Callable

SUSPENDED_S = 1.0  # a check later than this, and than half of `hang_after_s`, means that this process was suspended
PING_S = 5.0
PINGS_PER_HANG = 4  # minimum number of ping intervals within `hang_after_s`


class Heartbeat:
    """Heartbeat of the current owner; `reset` starts that of another."""

    def __init__(self, hang_after_s: float, clock: Callable[[], float]) -> None:
        self.hang_after_s = hang_after_s
        self.ping_s = min(PING_S, hang_after_s / PINGS_PER_HANG)
        self.last: float | None = None
        self._clock = clock
        self._awake_since = clock()
        self._pinged: float | None = None

    def reset(self) -> None:
        """Start over for a new owner."""
        self.last = self._pinged = None
        self._awake_since = self._clock()

    def on_message(self) -> float:
        """Record a message of any kind; returns the time."""
        self.last = now = self._clock()
        self._pinged = None
        return now

    def on_check(self, late_s: float) -> None:
        """Record that the supervisor's check ran `late_s` seconds late."""
        if late_s > max(SUSPENDED_S, self.hang_after_s / 2):
            self._awake_since = self._clock()

    def silent_s(self, since: float) -> float:
        """Return the seconds without a message since `since`."""
        return self._clock() - max(since, self.last or since, self._awake_since)

    def should_ping(self) -> bool:
        """Whether an idle owner must be pinged now; if so, records the ping."""
        if self._pinged is not None or self.silent_s(self._awake_since) < self.ping_s:
            return False
        self._pinged = self._clock()
        return True

    def unanswered_s(self) -> float:
        """Return the seconds of silence if a ping went unanswered for too long; else 0."""
        if self._pinged is None:
            return 0.0
        silent_s = self.silent_s(self._awake_since)
        answered_late = self._clock() - max(self._pinged, self._awake_since) > self.hang_after_s - self.ping_s
        return silent_s if answered_late else 0.0
