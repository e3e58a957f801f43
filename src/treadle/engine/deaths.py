"""Engine deaths: causes, restart back-off, and crash-loop detection.

A death explained by a culprit (`suspects`) is discounted: it neither delays a restart nor counts towards the crash
loop, as the culprit is refused from then on. Unexplained deaths are faults of the model, the device or the machine that
restarts do not fix: MAX_DEATHS of them within WINDOW_S seconds end the server.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
STABLE_S = 60.0
"""Seconds after which an engine counts as stable: its death resets the back-off."""
MAX_DEATHS = 10
"""Unexplained deaths within WINDOW_S that end the server. Finding a culprit takes two deaths, rarely four to six. Ten
leave a margin for that and for manual kills, and a loop of quick deaths reaches them within two minutes, including
back-off."""
WINDOW_S = 300.0


class Cause(StrEnum):
    """Cause of an engine's death."""

    CRASH = "crash"  # a fatal signal, an exit, a fault of MLX's runtime
    HANG = "hang"  # killed by the supervisor because it made no progress
    KILLED = "killed"  # SIGKILL or SIGSTOP from outside: an operator, a debugger, the out-of-memory killer

    @property
    def hint(self) -> str:
        """Advice for operators."""
        if self is Cause.KILLED:
            return "if nobody killed or stopped its process, memory ran out: see dmesg, and give the engine less memory"
        return "a request that does this again is found and refused"


@dataclass(frozen=True)
class Death:
    """Death of an engine that was ready. `reason`: text for people. `in_steps`: sequences that may have been in its
    last steps, by `Submit.arrival`."""

    cause: Cause
    reason: str
    in_steps: frozenset[int] = frozenset()


class Deaths:
    """Death records of one supervisor. Times are in seconds of its clock."""

    def __init__(self) -> None:
        self.by_cause: Counter[Cause] = Counter()
        self.explained = 0
        self._unexplained: deque[float] = deque(maxlen=MAX_DEATHS)
        self._quick = 0

    @property
    def total(self) -> int:
        """Number of deaths since the server started."""
        return self.by_cause.total()

    def add(self, cause: Cause, *, lived_s: float, now: float) -> None:
        """Record the death of an engine that was ready for `lived_s` seconds."""
        self.by_cause[cause] += 1
        self._unexplained.append(now)
        self._quick = 0 if lived_s > STABLE_S else self._quick + 1

    def explain(self, count: int) -> None:
        """Discount the last `count` deaths, whose culprit was found."""
        self.explained += count
        self._quick = max(0, self._quick - count)
        for _ in range(min(count, len(self._unexplained))):
            self._unexplained.pop()

    def backoff_s(self, failed_starts: int) -> float:
        """Return the seconds to wait before the next start; 0 after the first quick death."""
        return BACKOFF_S[min(max(self._quick - 1, 0) + failed_starts, len(BACKOFF_S) - 1)]

    def crash_loop_reason(self, now: float) -> str:
        """Return the reason to end the server because of a crash loop; "" if there is none."""
        if len(self._unexplained) < MAX_DEATHS or now - self._unexplained[0] > WINDOW_S:
            return ""
        return (
            f"it died {MAX_DEATHS} times within {WINDOW_S / 60:g} minutes and no request is to blame: the model, the "
            "device or the machine's memory is at fault; see the log above, try `treadle doctor --check`"
        )
