"""Owner in a child process, used by `serve`: a crash of MLX's runtime kills only the child."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from .. import output_streams
from ..core.messages import ToOwner
from ..environment import without_secrets
from ..file_descriptors import DescriptorReserve
from ..processes import is_stopped
from .framing import HEADER, frame, from_owner
from .handle import OnExit, OnMessage
from .in_flight_table import InFlightTable, allocate, map_table

log = logging.getLogger(__name__)

DRAIN_S = 0.5
"""Seconds to wait for the last output of a dead child."""


class ProcessOwner:
    """Owner process running `treadle.engine.child` with `entry` ("module:function") and its plain `arguments`.

    `spare` reserves the file descriptors for starting it, as clients may hold all others. The child's standard output
    and error are passed to `relay` on a thread; without `relay` the child inherits this process's.
    """

    def __init__(
        self,
        entry: str,
        arguments: Any,
        spare: DescriptorReserve | None = None,
        *,
        relay: Callable[[bytes], None] | None = None,
    ) -> None:
        self._entry = entry
        self._spare = spare or DescriptorReserve(0)
        self._arguments = arguments
        self._relay = relay
        self._table: InFlightTable | None = None
        self._drained = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, on_message: OnMessage, on_exit: OnExit) -> None:
        arguments = frame_arguments(self._arguments)
        with self._spare.released():
            reader = await self._launch()
        self._write(arguments)
        self._task = asyncio.create_task(self._read(reader, on_message, on_exit), name="treadle-engine-reader")

    async def _launch(self) -> asyncio.StreamReader:
        """Start the child and connect to it; returns the reader of its messages."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await self._spawn_with_table(theirs.fileno())
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            self.kill()
            if self._process is not None:
                await self._process.wait()
            raise
        return reader

    async def _spawn_with_table(self, fd: int) -> asyncio.subprocess.Process:
        table = allocate()
        try:
            self._table = map_table(table)
            return await self._spawn(fd, table)
        finally:
            os.close(table)

    async def _spawn(self, fd: int, table: int) -> asyncio.subprocess.Process:
        """Start the child in a process group of its own, so that Ctrl-C in a terminal reaches only the server."""
        command = (sys.executable, "-m", "treadle.engine.child", str(fd), str(table), self._entry)
        fds = [fd, table]
        spawn = partial(asyncio.create_subprocess_exec, *command, pass_fds=fds, process_group=0, env=without_secrets())
        if self._relay is None:
            self._drained.set()
            return await spawn(stdin=asyncio.subprocess.DEVNULL)
        ours, theirs = os.pipe()
        output_streams.relay_lines(ours, self._relay, self._on_drained(asyncio.get_running_loop()))
        try:
            return await spawn(stdin=asyncio.subprocess.DEVNULL, stdout=theirs, stderr=theirs)
        finally:
            os.close(theirs)

    def _on_drained(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        def drained() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._drained.set)

        return drained

    def send(self, message: ToOwner) -> None:
        self._write(frame(message))

    def kill(self) -> bool:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        return True

    async def ended(self) -> None:
        await self._ended.wait()

    def is_suspended(self) -> bool:
        return self.pid is not None and is_stopped(self.pid)

    def in_steps(self) -> frozenset[int]:
        return frozenset() if self._table is None else self._table.read()

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader, on_message: OnMessage, on_exit: OnExit) -> None:
        """Deliver messages until the child closes the socket, then wait for its exit."""
        assert self._process is not None
        assert self._writer is not None
        try:
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                on_message(from_owner.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            log.debug("the engine process closed its socket")
        except msgspec.MsgspecError:
            log.exception("the engine process sent an invalid message and is killed")
            self.kill()
        self._writer.close()
        how = describe_exit(await self._process.wait())
        with contextlib.suppress(TimeoutError):  # a child of the engine process may keep the pipe open
            await asyncio.wait_for(self._drained.wait(), DRAIN_S)
        self._ended.set()
        on_exit(how)


def frame_arguments(arguments: Any) -> bytes:
    """Serialize the arguments as the first frame."""
    body = msgspec.msgpack.encode(arguments)
    return HEADER.pack(len(body)) + body


def describe_exit(code: int) -> str:
    """Describe an exit status: an exit code, or the name of a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
