"""Event-loop watchdog: a thread that ends the process when the loop has not run for STUCK_S seconds.

The thread counts its own ticks instead of elapsed time, so a suspended laptop, a stopped process or a frozen container
does not trigger it. A debugger in the main thread prevents triggering. Under systemd (NOTIFY_SOCKET) the loop notifies
systemd's watchdog, which also covers a thread that never releases the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from types import FrameType

TICK_S = 1.0
STUCK_S = 30.0
MAX_DUMP_BYTES = 1 << 16

log = logging.getLogger(__name__)


class Watchdog:
    """Watchdog of one event loop. `run` is a task of that loop. When the loop has missed `stuck_s` seconds of ticks,
    `stuck` is called on the watchdog's thread with the stacks of all threads; it should end the process."""

    def __init__(self, stuck: Callable[[str], None], *, stuck_s: float = STUCK_S, tick_s: float = TICK_S) -> None:
        self._stuck = stuck
        self._tick_s = tick_s
        self._max_missed = max(1, round(stuck_s / tick_s))
        self._beats = 0
        self._notify = Notify()
        self._main = threading.main_thread().ident

    def ready(self) -> None:
        """Notify systemd that the start is complete."""
        self._notify("READY=1")

    async def run(self) -> None:
        """Start the watchdog thread and beat every `tick_s` seconds, until cancelled."""
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), name="treadle-watchdog", daemon=True).start()
        try:
            while True:
                self._beats += 1
                self._notify("WATCHDOG=1")
                await asyncio.sleep(self._tick_s)
        finally:
            over.set()
            self._notify("STOPPING=1")

    def _watch(self, over: threading.Event) -> None:
        seen = missed = 0
        while not over.wait(self._tick_s):
            missed = missed + 1 if self._beats == seen and not self._is_debugged() else 0
            seen = self._beats
            if missed >= self._max_missed:
                self._stuck(dump_stacks())
                return

    def _is_debugged(self) -> bool:
        """Whether a debugger traces the main thread."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        while frame is not None:
            if frame.f_trace is not None:
                return True
            frame = frame.f_back
        return False


class Notify:
    """Client of systemd's notification protocol: one datagram a message to NOTIFY_SOCKET, if it is set. Never
    blocks."""

    def __init__(self, address: str | None = None) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def __call__(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(message.encode(), self._address)


def dump_stacks() -> str:
    """The stacks of all threads, cut at MOST_DUMPED bytes."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(MAX_DUMP_BYTES).decode("utf-8", "replace").strip()
