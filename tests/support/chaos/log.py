"""Reader of the server's standard error, which checks for storms and tracebacks."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

TRACEBACK = "Traceback (most recent call last):"
EXPECTED = re.compile(r"chaos|std::bad_alloc")
"""Pattern of the last line of a traceback that chaos itself caused."""

WINDOW_S = 5
LINES_FREE = 150  # in a window, besides those of its requests
LINES_A_REQUEST = 2.0


class LogReader:
    """Reader of a pipe on a thread. While `deaf` is set it does not read, as a stalled log collector."""

    def __init__(self, pipe: int, copy: Path) -> None:
        self.deaf = threading.Event()
        self.bytes = 0
        self.tracebacks: list[str] = []
        self._lines: Counter[int] = Counter()
        self._pipe = pipe
        self._copy = copy.open("ab")
        self._trace: list[str] | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-log", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the pipe has ended."""
        self._thread.join(60)
        self._copy.close()

    def _run(self) -> None:
        rest = b""
        while True:
            while self.deaf.is_set():
                time.sleep(0.02)
            data = os.read(self._pipe, 1 << 16)
            if not data:
                break
            self.bytes += len(data)
            self._copy.write(data)
            *lines, rest = (rest + data).split(b"\n")
            self._lines[int(time.monotonic()) // WINDOW_S] += sum(not line.startswith(b"chaos: x") for line in lines)
            for line in lines:
                self._line(line.decode(errors="replace"))
        self._end_trace()
        os.close(self._pipe)

    def _line(self, line: str) -> None:
        if line.startswith(TRACEBACK):
            self._end_trace()
            self._trace = [line]
        elif self._trace is not None:
            self._trace.append(line)
            if line and not line.startswith((" ", TRACEBACK)):
                self._end_trace()

    def _end_trace(self) -> None:
        if self._trace is not None and not EXPECTED.search(self._trace[-1]) and len(self.tracebacks) < 1000:
            self.tracebacks.append("\n".join(self._trace))
        self._trace = None

    def storms(self, requests: Counter[int]) -> list[str]:
        """Return windows with more lines than their requests account for. `requests` counts those that ended, by
        window."""
        found = []
        for window, lines in sorted(self._lines.items()):
            near = sum(requests[window + i] for i in (-1, 0, 1))
            if lines > LINES_FREE + LINES_A_REQUEST * near:
                found.append(f"{lines} lines of log in {WINDOW_S} s with {near} requests")
        return found
