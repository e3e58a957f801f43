"""The fork server as the event loop sees it: start, load, fork, kill, and what it reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from ...environment import without_secrets
from ...errors import ModelError, TreadleError, from_code
from .messages import (
    HEADER,
    Broken,
    Checked,
    Fork,
    Forked,
    FromServer,
    Gone,
    Kill,
    Load,
    Loaded,
    Message,
    Stage,
    from_server,
    head,
)

log = logging.getLogger(__name__)

START_S = 60.0  # for the interpreter and its imports
CPU_SLACK = 6.0
LEAST_STAGE_S = 30.0
END_S = 5.0
FORK_S = 10.0  # for one fork, which takes milliseconds


class Channel:
    """Frames on a socket, for one reader and one writer on the event loop. `read` raises EOFError at the end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def write(self, message: Message, payload: bytes = b"") -> None:
        start = head(message, len(payload))
        if len(payload) < 65536:
            await self._loop.sock_sendall(self.sock, start + payload)
            return
        await self._loop.sock_sendall(self.sock, start)
        await self._loop.sock_sendall(self.sock, payload)

    async def read(self, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, bytes]:
        size, payload_bytes = HEADER.unpack(await self._exactly(HEADER.size))
        rest = await self._exactly(size + payload_bytes)
        view = memoryview(rest)
        return decoder.decode(view[:size]), bytes(view[size:])

    async def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = await self._loop.sock_recv_into(self.sock, view[at:])
            if not count:
                raise EOFError
            at += count
        return data

    def close(self) -> None:
        self.sock.close()


class ForkServerProcess:
    """One fork server. `on_gone` hears of each worker's end, `ended` is set when the process itself has ended, and
    `hung` where it was killed because it no longer forked."""

    def __init__(self, on_gone: Callable[[Gone], None]) -> None:
        self._on_gone = on_gone
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._channel: Channel
        self._forked: dict[int, asyncio.Future[int]] = {}
        self.ended = asyncio.Event()
        self.hung = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; it imports what it needs meanwhile."""
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        command = (sys.executable, "-m", "treadle.text.work.fork_server", str(theirs.fileno()), str(os.getpid()))
        quiet = asyncio.subprocess.DEVNULL
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=[theirs.fileno()],
                    stdin=quiet,
                    stdout=quiet,
                    stderr=quiet,  # a panic of the tokenizer library writes there, once a request
                    process_group=0,
                    env=_environment(),
                )
        except BaseException:
            ours.close()
            raise

    async def load(self, order: Load, on_checked: Callable[[], None]) -> Loaded:
        """Load the model. Raises ModelError or ConfigError, within a bound for each stage of the loading.
        `on_checked` is called once its folder has passed `order.check`."""
        await self._channel.write(order)
        stage = Stage("starting the text processes", START_S / CPU_SLACK)
        while True:
            try:
                async with asyncio.timeout(max(LEAST_STAGE_S, CPU_SLACK * stage.cpu_s)):
                    message, _ = await self._channel.read(from_server)
            except TimeoutError:
                self.kill()
                raise ModelError(f"{order.folder}: {stage.name} did not end: use another model") from None
            except (EOFError, OSError):
                raise ModelError(f"{order.folder}: {stage.name} {await self._how(stage)}") from None
            if isinstance(message, Broken):
                raise _error_of(message)
            if isinstance(message, Loaded):
                self._reading = asyncio.create_task(self._read(), name="treadle-text-server")
                return message
            if isinstance(message, Checked):
                on_checked()
            else:
                stage = message

    async def _how(self, stage: Stage) -> str:
        """How loading ended without a word."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"took more than {stage.cpu_s:g} s of processor time: use another model"
        return f"broke down ({_named(-code) if code else 'no exit code'}): use another model"

    async def fork(self, number: int) -> tuple[int, Channel]:
        """A new worker's process id and socket. Raises OSError or EOFError where the server is gone or can't fork; one
        that says nothing for FORK_S is killed."""
        ours, theirs = socket.socketpair()
        forked = self._forked[number] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                socket.send_fds(self._channel.sock, [head(Fork(number))], [theirs.fileno()])
            async with asyncio.timeout(FORK_S):
                return await forked, Channel(ours)
        except TimeoutError:
            ours.close()
            self.hung = True
            self.kill()
            raise OSError(f"the fork server {self.ending}") from None
        except BaseException:
            ours.close()
            raise
        finally:
            self._forked.pop(number, None)

    @property
    def ending(self) -> str:
        """How it ended, as a part of a sentence."""
        return f"started no worker within {FORK_S:g} s and was killed" if self.hung else "ended"

    def kill_worker(self, number: int) -> None:
        """Kill a worker, if it still runs."""
        with contextlib.suppress(OSError):
            self._channel.sock.send(head(Kill(number)))

    def kill(self) -> None:
        """End the process, and with it (on Linux) all workers."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End it and return once it has ended."""
        if self._reading is not None:
            self._reading.cancel()
        self.kill()
        if self._process is not None:
            self._channel.close()
            await self._process.wait()

    async def _read(self) -> None:
        assert self._process is not None
        try:
            while True:
                message, _ = await self._channel.read(from_server)
                self._hear(message)
        except (EOFError, OSError):
            log.debug("the text fork server closed its end")
        except msgspec.MsgspecError:
            log.exception("the text fork server sent what can't be read")
        self.kill()
        await self._process.wait()
        for forked in self._forked.values():
            if not forked.done():
                forked.set_exception(EOFError())
        self.ended.set()

    def _hear(self, message: FromServer) -> None:
        if isinstance(message, Forked):
            forked = self._forked.get(message.number)
            if forked is not None and not forked.done():
                forked.set_result(message.pid)
        elif isinstance(message, Gone):
            forked = self._forked.get(message.number)
            if forked is not None and not forked.done():
                forked.set_exception(OSError("the worker could not be forked"))
            self._on_gone(message)


def _environment() -> dict[str, str]:
    """Without secrets, and with the tokenizer library kept from starting threads: a process with threads can't fork."""
    return {**without_secrets(), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def _error_of(message: Broken) -> TreadleError:
    error = from_code(message.code, message.message)
    error.param = message.param
    return error


def _named(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {-number}"
