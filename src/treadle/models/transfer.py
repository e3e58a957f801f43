"""Download progress over all files of a model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..units import portion, size

_WINDOW_S = 10.0
_FIRST_S = 1.0  # seconds before a rate is reported


@dataclass(frozen=True)
class Transfer:
    """Snapshot of a download. `done_bytes`: on disk, including earlier attempts. `rate`: received bytes a second over
    the last ten seconds. `note`: the reason for waiting, if any."""

    model: str
    done_bytes: int
    total_bytes: int
    rate: float = 0.0
    note: str = ""

    @property
    def percent(self) -> int:
        """Percentage done, rounded down: 100 only when complete."""
        return 100 * self.done_bytes // self.total_bytes if self.total_bytes else 100

    @property
    def left_s(self) -> float | None:
        """Seconds left at this rate; None while no bytes are received."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None

    @property
    def details(self) -> str:
        """One line with percentage, bytes, rate, time left and note."""
        parts = [f"{self.percent} %", portion(self.done_bytes, self.total_bytes)]
        if self.left_s is not None and self.done_bytes < self.total_bytes:
            parts += [f"{size(self.rate)}/s", f"{duration(self.left_s)} left"]
        return ", ".join([*parts, *filter(None, [self.note])])

    def __str__(self) -> str:
        return f"downloading {self.model}: {self.details}"


class ProgressLines:
    """Reporter of a transfer in lines: its start, each new note, its end, and otherwise a line every `every_s`
    seconds."""

    def __init__(
        self, print_line: Callable[[str], None], every_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._print_line = print_line
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock()
        self._last = Transfer("", 0, -1)

    def __call__(self, transfer: Transfer) -> None:
        """Print `transfer` if a line is due."""
        news = transfer.note and transfer.note != self._last.note
        ended = transfer.done_bytes == transfer.total_bytes and self._last.done_bytes != self._last.total_bytes
        if news or ended or self._clock() >= self._next_s:
            if transfer != self._last:
                self._print_line(str(transfer))
            self._last, self._next_s = transfer, self._clock() + self._every_s


class DownloadProgress:
    """Counter of the bytes of each file, fed by several threads. `sizes`: complete sizes by file name."""

    def __init__(self, model: str, sizes: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._total = sum(sizes.values())
        self._clock = clock
        self._lock = threading.Lock()
        self._done = dict.fromkeys(sizes, 0)
        self._received = 0
        self._note = ""
        self._samples = deque([(clock(), 0)])

    def place(self, name: str, done_bytes: int) -> None:
        """Set the bytes of file `name` on disk, without counting them as received."""
        with self._lock:
            self._done[name] = done_bytes

    def receive(self, name: str, count: int) -> None:
        """Count `count` received bytes of file `name`."""
        with self._lock:
            self._done[name] += count
            self._received += count
            self._note = ""

    def note(self, text: str) -> None:
        """Set the reason for waiting, shown until bytes are received."""
        with self._lock:
            self._note = text

    def snapshot(self) -> Transfer:
        """Return the current state, with the rate over the snapshots of the last ten seconds."""
        with self._lock:
            now = self._clock()
            self._samples.append((now, self._received))
            while len(self._samples) > 2 and self._samples[0][0] < now - _WINDOW_S:
                self._samples.popleft()
            began, before = self._samples[0]
            rate = (self._received - before) / (now - began) if now >= began + _FIRST_S else 0.0
            return Transfer(self._model, sum(self._done.values()), self._total, rate, self._note)


def duration(seconds: float) -> str:
    """Format seconds for people: 45 s, 3 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
