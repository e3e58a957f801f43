"""Standard output and error that never block their writer: a bounded queue and a thread that empties it.

- A full pipe or a stopped terminal delays no writer: text that finds the queue full is dropped and counted.
- From the first drop on, all text is dropped until the queue is empty; then one notice counts the missing lines.
- Text keeps its order. Pieces are joined up to the size that a pipe takes as one, so that several processes can share
  a pipe line by line.
- `flush_within` waits for the queue to empty, within a bound.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

MOST_BYTES = 1 << 20
"""Capacity of the queue."""
AT_ONCE = select.PIPE_BUF
SETTLE_S = 0.5
"""Time that the end of the process waits for a slow reader."""
RETRY_S = 0.5
MOST_PART_BYTES = 1 << 16
"""The longest part of a line that is held back until the line ends."""
STANDARD = (0, 1, 2)
ERROR = 2


@dataclass(frozen=True)
class Statistics:
    """`dropped_lines` since the start, and `queued_bytes` that wait for the reader now."""

    dropped_lines: int = 0
    queued_bytes: int = 0


@dataclass(slots=True)
class _Mark:
    """A place in the queue that `flush_within` waits for."""

    reached: threading.Event = field(default_factory=threading.Event)


class LineWriter:
    """Writer of descriptor `fd` on a daemon thread of its own. `put` may be called on any thread and from finalizers.
    `notice` makes the line that reports a number of dropped lines."""

    def __init__(self, fd: int, *, most_bytes: int = MOST_BYTES) -> None:
        self.notice: Callable[[int], bytes] = _notice
        self._fd = fd
        self._most_bytes = most_bytes
        self._queue: SimpleQueue[bytes | _Mark] = SimpleQueue()  # reentrant, unlike Queue
        self._lock = threading.RLock()
        self._next: bytes | _Mark | None = None  # taken from the queue, and did not fit into the last write
        self._held = self._missing = self._dropped = 0
        self._dropping = False
        threading.Thread(target=self._run, name="treadle-output", daemon=True).start()

    def put(self, data: bytes) -> None:
        """Queue `data`, or drop it if the queue is full."""
        with self._lock:
            if self._dropping or self._held + len(data) > self._most_bytes:
                self._drop(data)
            else:
                self._held += len(data)
                self._queue.put(data)

    def flush_within(self, within_s: float = SETTLE_S) -> bool:
        """Wait until all data put so far is written; False if that takes longer than `within_s`."""
        mark = _Mark()
        self._queue.put(mark)
        return mark.reached.wait(within_s)

    def statistics(self) -> Statistics:
        return Statistics(self._dropped, self._held)

    def _drop(self, data: bytes) -> None:
        lines = max(1, data.count(b"\n"))
        self._dropping = True
        self._missing += lines
        self._dropped += lines

    # The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            first = self._queue.get() if self._next is None else self._next
            self._next = None
            if isinstance(first, bytes):
                self._write_batch(self._batch(first))
            if self._next is None and self._queue.empty():
                self._write_notice()
            if isinstance(first, _Mark):
                first.reached.set()

    def _write_batch(self, batch: bytes) -> None:
        written = self._write(batch)
        with self._lock:
            self._held -= len(batch)
            if not written:
                self._drop(batch)

    def _batch(self, first: bytes) -> bytes:
        """Return `first` joined with the pieces behind it, up to the size that a pipe takes as one."""
        parts, size = [first], len(first)
        while size < AT_ONCE and self._next is None:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if isinstance(item, _Mark) or size + len(item) > AT_ONCE:
                self._next = item
            else:
                parts.append(item)
                size += len(item)
        return b"".join(parts)

    def _write_notice(self) -> None:
        """Accept text again, after a notice of the number of dropped lines."""
        with self._lock:
            missing, self._missing, self._dropping = self._missing, 0, False
        if missing and not self._write(self.notice(missing)):
            with self._lock:
                self._missing += missing

    def _write(self, data: bytes) -> bool:
        """Write all of `data`, without a bound of time; False if the descriptor can't be written to."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process that shares it made it non-blocking
                select.select([], [self._fd], [], RETRY_S)
            except OSError:
                return False
        return True


def _notice(missing: int) -> bytes:
    return f"{missing} lines were dropped: nobody read this output\n".encode()


class QueuedText(io.TextIOBase):
    """Text stream over a LineWriter, for Python's own writers. A line is queued at its end, part of one by `flush`,
    which does not wait. `isatty` is that of `fd`."""

    def __init__(self, writer: LineWriter, fd: int) -> None:
        self.writer = writer
        self._fd = fd
        self._terminal = os.isatty(fd)
        self._part = ""
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._terminal

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        with self._lock:
            whole, end, self._part = (self._part + text).rpartition("\n")
            if end:
                self._put(whole + end)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            part, self._part = self._part, ""
            if part:
                self._put(part)

    def _put(self, text: str) -> None:
        self.writer.put(text.encode(self.encoding, self.errors))


# This process's streams ----------------------------------------------------------------------------------------------


_own: list[LineWriter] = []


def unblock() -> LineWriter:
    """Replace `sys.stderr` and `sys.stdout` by one queue to this process's standard error, until its end.
    Idempotent."""
    if not _own:
        _own.append(LineWriter(ERROR))
        sys.stderr = sys.stdout = QueuedText(_own[0], ERROR)
        atexit.register(flush_within)
    return _own[0]


def own() -> LineWriter | None:
    """Return the writer that `unblock` made; None if it was not called."""
    return _own[0] if _own else None


def flush_within(within_s: float = SETTLE_S) -> None:
    """Write the text that this process's streams hold, within a bound of `within_s` seconds if they are queued. For the
    end of the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # broken, closed, or None
            stream.flush()
    for writer in _own:
        writer.flush_within(within_s)


def open_missing_descriptors() -> None:
    """Open /dev/null in the place of closed standard descriptors, so that no socket or file gets their numbers, and
    streams for them."""
    for fd in STANDARD:
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(fd, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


# Another process's output --------------------------------------------------------------------------------------------


def relay_lines(fd: int, relay: Callable[[bytes], None], ended: Callable[[], None] = lambda: None) -> None:
    """Pass data from `fd` to `relay` on a daemon thread until the other side has closed it, then call `ended`. Data
    comes in whole lines, except lines longer than MOST_PART_BYTES."""
    threading.Thread(target=_relay_lines, args=(fd, relay, ended), name="treadle-relay", daemon=True).start()


def _relay_lines(fd: int, relay: Callable[[bytes], None], ended: Callable[[], None]) -> None:
    part = b""
    with os.fdopen(fd, "rb", buffering=0) as source:
        while data := source.read(MOST_PART_BYTES):
            whole, end, part = (part + data).rpartition(b"\n")
            if len(part) > MOST_PART_BYTES:
                whole, end, part = whole + end + part, b"\n", b""
            if end:
                relay(whole + end)
    if part:
        relay(part + b"\n")
    ended()
