"""Client of the fork server on the event loop: start, load, fork, kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable

import msgspec

from ...environment import without_secrets
from ...errors import ModelError, TreadleError, from_code
from .channel import Channel, start_child
from .messages import (
    Exited,
    FolderChecked,
    Fork,
    Forked,
    FromServer,
    Kill,
    Load,
    Loaded,
    LoadFailed,
    Stage,
    frame_start,
    from_server,
)
from .worker_log import log_load

log = logging.getLogger(__name__)

START_S = 60.0  # for the interpreter and its imports
CPU_SLACK = 6.0
MIN_STAGE_S = 30.0
END_S = 5.0
FORK_S = 10.0  # for one fork, which takes milliseconds


class ForkServerProcess:
    """A fork server. `on_exit` is called with each worker's exit. `ended` is set when the fork server itself has
    exited, `hung` when it was killed because it no longer forked."""

    def __init__(self, on_exit: Callable[[Exited], None]) -> None:
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._channel: Channel
        self._forked: dict[int, asyncio.Future[int]] = {}
        self.ended = asyncio.Event()
        self.hung = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def loaded(self) -> bool:
        """Whether it has loaded the model, and can fork."""
        return self._reading is not None

    async def start(self) -> None:
        """Start the process; returns before its imports have finished."""
        self._process, self._channel = await start_child("treadle.text.work.fork_server", _environment())

    async def load(self, order: Load, on_checked: Callable[[], None]) -> Loaded:
        """Load the model, with a time limit for each stage. `on_checked` is called once the folder has passed
        `order.check`. Raises ModelError or ConfigError."""
        await self._channel.write(order)
        stage = Stage("starting the text processes", START_S / CPU_SLACK)
        while True:
            try:
                async with asyncio.timeout(max(MIN_STAGE_S, CPU_SLACK * stage.cpu_s)):
                    message, _ = await self._channel.read(from_server)
            except TimeoutError:
                self.kill()
                raise ModelError(f"{order.folder}: {stage.name} did not end: use another model") from None
            except (EOFError, OSError):
                raise ModelError(f"{order.folder}: {stage.name} {await self._describe_end(stage)}") from None
            if isinstance(message, LoadFailed | Loaded) and message.log is not None:
                log_load(message.log)
            if isinstance(message, LoadFailed):
                raise _error_of(message)
            if isinstance(message, Loaded):
                self._reading = asyncio.create_task(self._read(), name="treadle-text-server")
                return message
            if isinstance(message, FolderChecked):
                on_checked()
            else:
                stage = message

    async def _describe_end(self, stage: Stage) -> str:
        """Describe the exit of a process that reported no result of loading."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"took more than {stage.cpu_s:g} s of processor time: use another model"
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL), as the kernel's out-of-memory killer does: free memory, and start again"
        return f"broke down ({_signal_name(-code) if code else 'no exit code'}): use another model"

    async def fork(self, number: int) -> tuple[int, Channel]:
        """Fork a worker and return its process id and socket. The fork server must be `loaded`; if it does not answer
        within FORK_S seconds it is killed. Raises OSError or EOFError when it has ended or can't fork."""
        ours, theirs = socket.socketpair()
        forked = self._forked[number] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                socket.send_fds(self._channel.sock, [frame_start(Fork(number))], [theirs.fileno()])
            async with asyncio.timeout(FORK_S):
                return await forked, Channel(ours)
        except TimeoutError:
            ours.close()
            self.hung = True
            self.kill()
            raise OSError(f"the fork server {self.exit_reason}") from None
        except BaseException:
            ours.close()
            raise
        finally:
            self._forked.pop(number, None)

    @property
    def exit_reason(self) -> str:
        """The reason of its exit, as part of a sentence."""
        return f"started no worker within {FORK_S:g} s and was killed" if self.hung else "ended"

    def kill_worker(self, number: int) -> None:
        """Kill a worker, if it is still running."""
        with contextlib.suppress(OSError):
            self._channel.sock.send(frame_start(Kill(number)))

    def kill(self) -> None:
        """Kill the process. On Linux its workers are killed with it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Kill the process and wait for its exit."""
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
                self._handle(message)
        except (EOFError, OSError):
            log.debug("the text fork server closed its socket")
        except msgspec.MsgspecError:
            log.exception("the text fork server sent an invalid message and is killed")
        self.kill()
        await self._process.wait()
        for forked in self._forked.values():
            if not forked.done():
                forked.set_exception(EOFError())
        self.ended.set()

    def _handle(self, message: FromServer) -> None:
        if isinstance(message, Forked):
            forked = self._forked.get(message.number)
            if forked is not None and not forked.done():
                forked.set_result(message.pid)
        elif isinstance(message, Exited):
            forked = self._forked.get(message.number)
            if forked is not None and not forked.done():
                forked.set_exception(OSError("the worker could not be forked"))
            self._on_exit(message)


def _environment() -> dict[str, str]:
    """The environment without secrets, and without threads of the tokenizer library: forking needs a single thread."""
    return {**without_secrets(), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def _error_of(message: LoadFailed) -> TreadleError:
    error = from_code(message.code, message.message)
    error.param = message.param
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {-number}"
