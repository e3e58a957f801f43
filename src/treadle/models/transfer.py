"""Progress of a download, over all files of a model together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..units import portion, size

_WINDOW_S = 10.0
_FIRST_S = 1.0  # before that a rate says nothing


@dataclass(frozen=True)
class Transfer:
    """State of a download at one moment. `done_bytes` are on disk, those of earlier attempts included; `rate` is bytes
    a second from the network over the last ten seconds; `note` says what it waits for."""

    model: str
    done_bytes: int
    total_bytes: int
    rate: float = 0.0
    note: str = ""

    @property
    def percent(self) -> int:
        """Whole percent, rounded down: 100 only when every byte is there."""
        return 100 * self.done_bytes // self.total_bytes if self.total_bytes else 100

    @property
    def left_s(self) -> float | None:
        """Seconds to go at this rate; None while nothing comes in."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None

    @property
    def details(self) -> str:
        """Percent, bytes, rate, time left and note in one line."""
        parts = [f"{self.percent} %", portion(self.done_bytes, self.total_bytes)]
        if self.left_s is not None and self.done_bytes < self.total_bytes:
            parts += [f"{size(self.rate)}/s", f"{duration(self.left_s)} left"]
        return ", ".join([*parts, *filter(None, [self.note])])

    def __str__(self) -> str:
        return f"downloading {self.model}: {self.details}"


class Lines:
    """Says a transfer in lines: the first state, each new note, the end, and else one every `every_s` seconds."""

    def __init__(
        self, say: Callable[[str], None], every_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock()
        self._last = Transfer("", 0, -1)

    def __call__(self, transfer: Transfer) -> None:
        """Say `transfer` if it is time to."""
        news = transfer.note and transfer.note != self._last.note
        ended = transfer.done_bytes == transfer.total_bytes and self._last.done_bytes != self._last.total_bytes
        if news or ended or self._clock() >= self._next_s:
            if transfer != self._last:
                self._say(str(transfer))
            self._last, self._next_s = transfer, self._clock() + self._every_s


class Tally:
    """Bytes of each file as they arrive, from several threads. `sizes` are the whole files' sizes by name."""

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
        """File `name` has `done_bytes` on disk; what is new among them was not received just now."""
        with self._lock:
            self._done[name] = done_bytes

    def receive(self, name: str, count: int) -> None:
        """`count` more bytes of file `name` came in."""
        with self._lock:
            self._done[name] += count
            self._received += count
            self._note = ""

    def note(self, text: str) -> None:
        """Say what the download waits for, until bytes come in again."""
        with self._lock:
            self._note = text

    def snapshot(self) -> Transfer:
        """The state now. The rate is taken over the snapshots of the last ten seconds."""
        with self._lock:
            now = self._clock()
            self._samples.append((now, self._received))
            while len(self._samples) > 2 and self._samples[0][0] < now - _WINDOW_S:
                self._samples.popleft()
            began, before = self._samples[0]
            rate = (self._received - before) / (now - began) if now >= began + _FIRST_S else 0.0
            return Transfer(self._model, sum(self._done.values()), self._total, rate, self._note)


def duration(seconds: float) -> str:
    """Seconds for people: 45 s, 3 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
