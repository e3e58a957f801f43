"""Signals that end a server, in our own hands (C3).

The first SIGINT, SIGTERM or SIGHUP asks for a shutdown that lets running requests end. The second asks for an end now:
what runs is told so, and the process ends within END_S seconds with 128 plus the signal's number, however far it got.
A third ends it on the spot. A SIGHUP that was ignored at the start, as under nohup, stays ignored.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S = 2.0


class ShutdownSignals:
    """While installed, `requested` is set by the first signal. The second calls `hurry`. `kill` ends what was started,
    right before this process ends by itself."""

    def __init__(self, *, hurry: Callable[[], None], kill: Callable[[], None]) -> None:
        self.requested = asyncio.Event()
        self._hurry = hurry
        self._kill = kill
        self._code: int | None = None
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._installed = [number for number in SIGNALS if not (ignored and number is signal.SIGHUP)]

    def __enter__(self) -> ShutdownSignals:
        loop = asyncio.get_running_loop()
        for number in self._installed:
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exception: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._installed:
            loop.remove_signal_handler(number)

    def exit_code(self, code: int) -> int:
        """`code`, or that of the second signal, if there was one."""
        return code if self._code is None else self._code

    def _on_signal(self, number: signal.Signals) -> None:
        if self._code is not None:
            self._end(128 + number)
        elif self.requested.is_set():
            self._code = 128 + number
            asyncio.get_running_loop().call_later(END_S, self._end, self._code)
            self._hurry()
        else:
            self.requested.set()

    def _end(self, code: int) -> None:
        self._kill()
        os._exit(code)
