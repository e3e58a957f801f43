"""Fork server: `python -m treadle.text.work.fork_server FD PARENT`. FD is one end of a socket pair, PARENT the
server's process id.

Loads the model within limits of time and memory, reports the result, and then forks workers on demand. It starts no
threads and runs no code of the model after loading, so that it always answers. SIGINT, SIGTERM and SIGHUP are ignored:
it exits when the server's end of the socket closes, or with the server.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import ModelError, TreadleError
from ...gc_pause import without_collections
from . import limits
from .messages import (
    HEADER,
    Exited,
    FolderChecked,
    Fork,
    Forked,
    Kill,
    Load,
    Loaded,
    LoadFailed,
    Speeds,
    Stage,
    read,
    to_server,
    write,
)
from .stages import STAGES
from .worker_log import LineCollector

if TYPE_CHECKING:
    from ..tokenizer import TextModel

SLOTS = 256
CHECK_CPU_S = 10.0
TEMPLATE_CPU_S = 3.0
TOKENIZER_CPU_S = 10.0
TOKENIZER_CPU_S_PER_BYTE = 1e-6
MEASURE_S = 0.02
_SAMPLE = b'{"messages": [{"role": "user", "content": "The ship left the harbour at 06:45, three hours late."}]}'
_TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}] * 2


class ForkServer:
    """The loaded model and the forked workers by number."""

    def __init__(self, sock: socket.socket, load: Load) -> None:
        self._sock = sock
        self._load = load
        self._stages = mmap(-1, SLOTS)
        self._pids: dict[int, int] = {}
        self._log = LineCollector()

    # Loading ---------------------------------------------------------------------------------------------------

    def load(self) -> bool:
        """Load the model and report success or failure; True on success."""
        self._log.install()
        try:
            limits.limit_memory(self._load.memory_bytes)
            self._model, self._jobs = self._load_model(), self._load_jobs()
            self._stage("measuring how fast this machine reads text", TOKENIZER_CPU_S)
            from ..packed_view import pack

            view, speeds = pack(self._model), measure_speeds(self._model)
            message = Loaded(view, speeds, self._log.take())
            limits.limit_cpu(0.0)
            limits.lift_memory_limit()
            write(self._sock, message)
            return True
        except TreadleError as error:
            self._report_failure(error.message, error.code, error.param)
        except MemoryError:
            self._report_failure(self._too_large())
        except BaseException as error:  # includes panics of native libraries
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._report_failure(f"{self._load.folder}: {self._stage_name} failed ({cause})")
        return False

    def _report_failure(self, message: str, code: str = ModelError.code, param: str | None = None) -> None:
        write(self._sock, LoadFailed(code, message, param, self._log.take()))

    def _load_model(self) -> TextModel:
        load, folder = self._load, Path(self._load.folder)
        if load.check:
            self._stage("reading the model's files", CHECK_CPU_S)
            load_object(load.check)(folder)
        write(self._sock, FolderChecked())
        with without_collections():
            from ..tokenizer import TextModel  # a slow import; the engine's start waits for FolderChecked

        template = None if load.chat_template is None else Path(load.chat_template)
        return TextModel.load(
            folder,
            chat_template=template,
            context=load.context,
            tool_parser=load.tool_parser,
            reasoning_parser=load.reasoning_parser,
            stage=self._begin_stage,
        )

    def _load_jobs(self) -> Any:
        with without_collections():
            return load_object(self._load.jobs)

    def _begin_stage(self, name: str, file_bytes: int) -> None:
        if name == "template":
            self._stage("reading the model's chat template", TEMPLATE_CPU_S)
        else:
            self._stage("reading the model's tokenizer", TOKENIZER_CPU_S + file_bytes * TOKENIZER_CPU_S_PER_BYTE)

    def _stage(self, name: str, cpu_s: float) -> None:
        self._stage_name = name
        write(self._sock, Stage(name, cpu_s))
        limits.limit_cpu(cpu_s)

    def _too_large(self) -> str:
        most = self._load.memory_bytes / 2**30
        return f"{self._load.folder}: {self._stage_name} needs more than {most:.1f} GiB of memory: use another model"

    # Workers ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Fork, kill and reap workers until the server closes the socket."""
        importlib.import_module("treadle.text.work.worker")  # once, instead of in each worker
        gc.collect()
        gc.freeze()
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._sock, woken], [], [])
            if woken in ready:
                woken.recv(4096)
                self._reap()
            if self._sock in ready and not self._handle_order((wake, woken)):
                return

    def _handle_order(self, inner: tuple[socket.socket, ...]) -> bool:
        """Handle one message; False at the end of the stream."""
        start, fds, _, _ = socket.recv_fds(self._sock, HEADER.size, 1)  # the descriptor arrives with the first byte
        frame = read(self._sock, to_server, start)
        if frame is None:
            return False
        order, _ = frame
        if isinstance(order, Fork):
            self._fork(order.number, socket.socket(fileno=fds[0]), inner)
        elif isinstance(order, Kill) and order.number in self._pids:
            os.kill(self._pids[order.number], signal.SIGKILL)  # not reaped yet, so the pid can't have been reused
        return True

    def _fork(self, number: int, sock: socket.socket, inner: tuple[socket.socket, ...]) -> None:
        self._stages[number % SLOTS] = 0
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            write(self._sock, Exited(number, 0, ""))
            sock.close()
            return
        if pid == 0:
            self._run_worker(number, sock, me, inner)
        sock.close()
        self._pids[number] = pid
        write(self._sock, Forked(number, pid))

    def _run_worker(self, number: int, sock: socket.socket, parent: int, inner: tuple[socket.socket, ...]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            limits.die_with_parent(parent)
            for inherited in (self._sock, *inner):
                inherited.close()
            limits.limit_memory(self._load.worker_bytes)
            from .worker import Worker

            Worker(sock, self._model, self._jobs, self._stages, number % SLOTS, self._log).serve()
        finally:
            os._exit(0)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[number]
                by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                write(self._sock, Exited(number, by, STAGES[self._stages[number % SLOTS]]))


def load_object(name: str) -> Any:
    """Import and return the object named "module:name"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def measure_speeds(model: TextModel) -> Speeds:
    """Measure this machine's speeds in processor time."""
    import json

    text = _SAMPLE.decode() * 20
    parse_s = _cpu_seconds(lambda: json.loads(_SAMPLE))
    tokenize_s = _cpu_seconds(lambda: model.encode(text))
    render_s = 0.0 if model.chat_template is None else _cpu_seconds(lambda: _render_sample(model))
    return Speeds(len(_SAMPLE) / parse_s, len(text) / tokenize_s, render_s)


def _render_sample(model: TextModel) -> None:
    try:
        model.render_chat(_TURNS)
    except TreadleError:
        return  # the template rejects this conversation


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return the mean processor time of a call in seconds, over at least MEASURE_S of calls."""
    began, count = time.process_time(), 0
    while (spent := time.process_time() - began) < MEASURE_S:
        work()
        count += 1
    return max(1e-7, spent / count)


def main(argv: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    limits.die_with_parent(int(argv[1]))
    limits.disable_core_dumps()
    sock = socket.socket(fileno=int(argv[0]))
    sock.set_inheritable(False)
    first = read(sock, to_server)
    if first is None:
        return 1
    server = ForkServer(sock, first[0])
    if not server.load():
        return 1
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
