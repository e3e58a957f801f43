"""Handlers of the signals that end a server (C3).

The first SIGINT, SIGTERM or SIGHUP requests a shutdown that lets running requests end. The second requests an end now:
running requests end with an error, and the process ends within END_S seconds with 128 plus the signal's number, however
far it got. A third ends it on the spot. A SIGHUP that was ignored at the start, as under nohup, stays ignored.

A thread reads the signals from the descriptor to which the interpreter writes their numbers, and counts them: the
second signal ends the process even if the event loop does not run any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from .. import output_streams

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S = 1.5
KILL_S = 0.25
FLUSH_S = 0.2


def exit_now(code: int, kill: Callable[[], None]) -> None:
    """End this process now, from any thread; `kill` and the rest of the log have a moment each, even if threads are
    stuck."""
    run_with_timeout(KILL_S, kill)
    output_streams.flush_within(FLUSH_S)
    os._exit(code)


def run_with_timeout(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` on a thread of its own and wait for it at most `seconds`; its errors are dropped."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


class ShutdownSignals:
    """Signal handlers, while entered. The first signal sets `requested`. The second calls `hurry`, on the event loop.
    `kill` ends child processes, on any thread, right before this process ends by itself."""

    def __init__(self, *, hurry: Callable[[], None], kill: Callable[[], None]) -> None:
        self.requested = asyncio.Event()
        self._hurry = hurry
        self._kill = kill
        self._code: int | None = None
        self._count = 0
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._installed = [number for number in SIGNALS if not (ignored and number is signal.SIGHUP)]
        self._before: dict[signal.Signals, Any] = {}
        self._deadline: threading.Timer | None = None

    def __enter__(self) -> ShutdownSignals:
        self._loop = asyncio.get_running_loop()
        self._numbers, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._woken = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in self._installed:
            self._before[number] = signal.signal(number, _ignore)
            signal.siginterrupt(number, False)
        threading.Thread(target=self._read_signals, name="treadle-signals", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._wake.close()
        if self._deadline is not None:
            self._deadline.cancel()

    def exit_code(self, code: int) -> int:
        """Return `code`, or that of the second signal, if there was one."""
        return code if self._code is None else self._code

    # The thread --------------------------------------------------------------------------------------------------

    def _read_signals(self) -> None:
        with self._numbers:
            while numbers := self._numbers.recv(64):
                for number in numbers:
                    if number in self._installed:
                        self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        self._count += 1
        if self._count == 1:
            self._call(self.requested.set)
        elif self._count == 2:
            self._code = 128 + number
            self._deadline = threading.Timer(END_S, exit_now, (self._code, self._kill))
            self._deadline.daemon = True
            self._deadline.start()
            self._call(self._hurry)
        else:
            exit_now(128 + number, self._kill)

    def _call(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends anyway
            self._loop.call_soon_threadsafe(work)


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the thread reads the number."""
