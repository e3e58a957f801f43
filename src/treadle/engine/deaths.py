"""Deaths of the engine: causes, back-off before a restart, and the bound of a crash loop.

A death that a culprit explains (`suspects`) is struck from the books: it neither delays a restart nor counts towards
the crash loop, as the culprit is refused from then on. What stays unexplained is a fault of the model, the device or
the machine, which a restart of the engine alone has not mended: MOST_DEATHS of them within WINDOW_S end the server.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
SETTLED_S = 60.0
"""Seconds of life after which a death is no longer a quick one."""
MOST_DEATHS = 10
"""Unexplained deaths within WINDOW_S that end the server. To find a culprit takes two deaths, in rare cases four to
six; ten leave room for that and for a kill by hand or two, and are reached within two minutes by a loop of quick
deaths, back-off included."""
WINDOW_S = 300.0


class Cause(StrEnum):
    """How an engine ended."""

    CRASH = "crash"  # by itself: a fatal signal, an exit, a fault of MLX's runtime
    HANG = "hang"  # killed by the supervisor, as no step ended
    KILLED = "killed"  # by SIGKILL, or stopped, from outside: an operator, a debugger, or the system short of memory

    @property
    def hint(self) -> str:
        """What an operator can do about it."""
        if self is Cause.KILLED:
            return "if nobody killed or stopped its process, memory ran out: see dmesg, and give the engine less memory"
        return "a request that does this again is found and refused"


@dataclass(frozen=True)
class Death:
    """One end of a ready engine; `reason` is for people. `in_steps` are the sequences that may have been in its last
    steps, by `Submit.arrival`."""

    cause: Cause
    reason: str
    in_steps: frozenset[int] = frozenset()


class Deaths:
    """The books of one supervisor. Times are in seconds of its clock."""

    def __init__(self) -> None:
        self.by_cause: Counter[Cause] = Counter()
        self.explained = 0
        self._unexplained: deque[float] = deque(maxlen=MOST_DEATHS)
        self._quick = 0

    @property
    def total(self) -> int:
        """Deaths since the server started."""
        return self.by_cause.total()

    def add(self, cause: Cause, *, lived_s: float, now: float) -> None:
        """Count the death of an engine that was ready for `lived_s` seconds."""
        self.by_cause[cause] += 1
        self._unexplained.append(now)
        self._quick = 0 if lived_s > SETTLED_S else self._quick + 1

    def explain(self, count: int) -> None:
        """The last `count` deaths have a culprit."""
        self.explained += count
        self._quick = max(0, self._quick - count)
        for _ in range(min(count, len(self._unexplained))):
            self._unexplained.pop()

    def backoff_s(self, failed_starts: int) -> float:
        """Seconds to wait before the next start: none after the first quick death."""
        return BACKOFF_S[min(max(self._quick - 1, 0) + failed_starts, len(BACKOFF_S) - 1)]

    def loop(self, now: float) -> str:
        """Why the server must end, in words; empty while it need not."""
        if len(self._unexplained) < MOST_DEATHS or now - self._unexplained[0] > WINDOW_S:
            return ""
        return (
            f"it died {MOST_DEATHS} times within {WINDOW_S / 60:g} minutes and no request is to blame: the model, the "
            "device or the machine's memory is at fault; see the log above, try `treadle doctor --check`"
        )
