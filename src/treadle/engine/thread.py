"""Owner on a dedicated thread, for library use and `serve --in-process`.

A thread can't be killed: a hung one remains, and the engine is reported as failed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading

from ..core.messages import FromOwner, Stop, ToOwner
from ..runner.base import RunnerFactory
from .handle import OnExit, OnMessage
from .in_flight_table import InFlightTable
from .mailbox import Mailbox
from .outbox import Outbox
from .owner import OwnerLimits, run_owner

log = logging.getLogger(__name__)

JOIN_S = 10.0
"""Seconds that a program waits at its exit for an engine that it did not stop."""


class ThreadOwner:
    """Owner running `run_owner` on a dedicated thread; its messages are delivered on the event loop."""

    def __init__(self, build: RunnerFactory, limits: OwnerLimits) -> None:
        self._build = build
        self._limits = limits
        self._mailbox = Mailbox()
        self._outbox = Outbox()
        self._table = InFlightTable()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="treadle-owner", daemon=True)
        self._scheduled = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return os.getpid()

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_exit = on_message, on_exit
        atexit.register(self._end_with_the_program)
        self._thread.start()

    def send(self, message: ToOwner) -> None:
        self._mailbox.put(message)

    def kill(self) -> bool:
        self._mailbox.put(Stop())
        return False

    async def ended(self) -> None:
        await self._ended.wait()

    def is_suspended(self) -> bool:
        return False

    def in_steps(self) -> frozenset[int]:
        return self._table.read()

    # On the owner's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        clean = False
        try:
            clean = run_owner(self._build, self._limits, self._mailbox, self._send, table=self._table)
        except BaseException:
            log.exception("the owner's thread failed; the engine is lost")
        finally:
            atexit.unregister(self._end_with_the_program)
            self._call(self._finish, "stopped" if clean else "failed")

    def _send(self, message: FromOwner) -> None:
        """Queue a message for the event loop, which is woken once for all queued messages."""
        self._outbox.put(message)
        with self._lock:
            if self._scheduled:
                return
            self._scheduled = True
        self._call(self._deliver)

    def _call(self, function: object, *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]

    # At the program's end ----------------------------------------------------------------------------------------

    def _end_with_the_program(self) -> None:
        """Stop the owner at the program's exit: MLX aborts a process that exits while one of its threads works."""
        self._mailbox.put(Stop())
        self._thread.join(JOIN_S)

    # On the event loop -------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        with self._lock:
            self._scheduled = False
        for message in self._outbox.take_nowait():
            self._on_message(message)

    def _finish(self, how: str) -> None:
        self._deliver()
        self._ended.set()
        self._on_exit(how)
