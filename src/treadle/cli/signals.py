"""SIGINT and SIGTERM, in our own hands: the first asks for a shutdown, the second ends the process at once (C3)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ShutdownSignals:
    """While installed, `requested` is set by the first signal; the second calls `at_once` and exits 128 + signal."""

    def __init__(self, at_once: Callable[[], None]) -> None:
        self.requested = asyncio.Event()
        self._at_once = at_once

    def __enter__(self) -> ShutdownSignals:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exception: object) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            self._at_once()
            os._exit(128 + number)
        self.requested.set()
