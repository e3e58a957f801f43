"""Governor of BLAS threads on a machine that other programs use too.

OpenBLAS's threads wait for each other without sleeping. On idle cores two of them nearly halve a batch's step; beside
one other busy process on two cores the same two made it seven times as long, as each product waits for a thread that is
not running; beside two, twenty times. So the number follows what other processes leave: it is looked at every
`INTERVAL_S`, between two steps, starts at one, goes down at once and up after `CALM_LOOKS` looks that would allow it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

INTERVAL_S = 0.25
CALM_LOOKS = 4
SPARE = 0.5  # of a core: what others may use of the last one before we leave it to them


class ThreadGovernor:
    """Keeps at most `most` threads, and no more than others leave alone of the `cpus` that this process may run on.

    `busy_s` gives the CPU seconds that these have been busy so far, None where that can't be known; `own_s` those that
    this process has used.
    """

    def __init__(
        self,
        set_threads: Callable[[int], None],
        most: int,
        *,
        cpus: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        busy_s: Callable[[], float | None] | None = None,
        own_s: Callable[[], float] = time.process_time,
    ) -> None:
        self.threads = 1
        self._set_threads = set_threads
        self._most = most
        self._cpus = max(most, cpus or len(own_cpus()))
        self._clock = clock
        self._busy_s = busy_s or machine_busy_s
        self._own_s = own_s
        self._calm = 0
        self._last = self._look()
        set_threads(1)

    def before_step(self) -> None:
        """Set the number of threads for what comes next. Costs a clock reading; every INTERVAL_S a small file."""
        if self._most == 1 or self._clock() - self._last[0] < INTERVAL_S:
            return
        then, self._last = self._last, self._look()
        passed_s = self._last[0] - then[0]
        if passed_s > 0:
            others = max(0.0, (self._last[1] - then[1]) / passed_s)
            self._use(int(min(self._most, max(1, self._cpus - others + SPARE))))

    def _use(self, threads: int) -> None:
        self._calm = self._calm + 1 if threads > self.threads else 0
        if threads < self.threads or self._calm >= CALM_LOOKS:
            self.threads, self._calm = threads, 0
            self._set_threads(threads)

    def _look(self) -> tuple[float, float]:
        """Now, and the CPU seconds that others have used so far."""
        busy = self._busy_s()
        return self._clock(), 0.0 if busy is None else busy - self._own_s()


def own_cpus() -> frozenset[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def machine_busy_s(path: Path = Path("/proc/stat"), cpus: Collection[int] | None = None) -> float | None:
    """CPU seconds that all processes have used on `cpus` (by default those that this process may run on) since the
    machine started; None where that can't be read."""
    names = {f"cpu{cpu}" for cpu in (own_cpus() if cpus is None else cpus)}
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        ticks = [_busy_ticks(words) for words in lines if words and words[0] in names]
    except (OSError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _busy_ticks(words: list[str]) -> int:
    """Raises ValueError for a line that is not as expected."""
    user, nice, system, _, _, irq, softirq, steal = map(int, words[1:9])
    return user + nice + system + irq + softirq + steal
