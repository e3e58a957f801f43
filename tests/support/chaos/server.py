"""One `treadle serve` after another on the same ports: its process, its engine's, its log and its status."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

import psutil

from treadle.processes import free_ports

from .connection import Door
from .engine import FOLDER
from .log import LogReader

ROOT = Path(__file__).resolve().parents[3]
START_S = 120.0
STOP_S = 60.0
KEY = "chaos-key"
OWN_FILES = 4096
PIPE_BYTES = 4096  # of the log: an unread one fills soon


@dataclass(frozen=True)
class Usage:
    """Resources of one process. `pss` is 0 if the system does not report it."""

    rss: int
    pss: int
    fds: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read the resources. Raises psutil.Error if there is no such process."""
        process = psutil.Process(pid)
        full = process.memory_full_info()
        return cls(full.rss, getattr(full, "pss", 0), process.num_fds(), process.num_threads())


@dataclass
class Server:
    """The server under attack. `begin` starts one, and may be called again after its end."""

    model: Path
    folder: Path
    options: Sequence[str] = ()
    open_files: int | None = None
    ports: list[int] = field(default_factory=lambda: free_ports(2))
    process: subprocess.Popen[bytes] | None = None
    log: LogReader | None = None
    logs: list[LogReader] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    starts: int = 0

    def __post_init__(self) -> None:
        self.orders = self.folder / "orders"
        self.orders.mkdir(exist_ok=True)
        self.door = Door(self.ports[0], KEY)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def begin(self, *, full_disk: bool = False) -> None:
        """Start a server. With `full_disk` every line of its log meets ENOSPC."""
        command = [sys.executable, "-m", "tests.support.chaos.serve", str(self.model)]
        command += ["--port", str(self.ports[0]), "--grpc-port", str(self.ports[1]), "--threads", "1", *self.options]
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, FOLDER: str(self.orders), "TREADLE_API_KEY": KEY, "PYTHONPATH": os.pathsep.join(paths)}
        self.starts += 1
        if full_disk:
            with open("/dev/full", "wb") as stderr:
                self._spawn(command, env, stderr.fileno())
            self.log = None
            return
        read, write = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self._spawn(command, env, write)
        finally:
            os.close(write)
        self.log = LogReader(read, self.folder / "server.log")
        self.logs.append(self.log)

    def _spawn(self, command: Sequence[str], env: dict[str, str], stderr: int) -> None:
        bound = [] if self.open_files is None else ["sh", "-c", f'ulimit -n {self.open_files}; exec "$@"', "sh"]
        self.process = subprocess.Popen(
            [*bound, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=env,
            cwd=self.folder,
            start_new_session=True,
        )

    # Life --------------------------------------------------------------------------------------------------------

    async def ready(self, within_s: float = START_S) -> float:
        """Wait until it takes requests; return the seconds. Raises TimeoutError; RuntimeError if it ended."""
        began = time.monotonic()
        while time.monotonic() - began < within_s:
            if self.ended is not None:
                self.kill()  # also reads its log to the end
                raise RuntimeError(f"the server ended with {self.ended}: {self.last_words()}")
            with contextlib.suppress(OSError, TimeoutError, EOFError, asyncio.IncompleteReadError):
                if (await self.door.get("/health/ready", 5.0))[0] == 200:
                    self.engine_pid()
                    return time.monotonic() - began
            await asyncio.sleep(0.03)
        raise TimeoutError(f"not ready within {within_s:g} s")

    @property
    def ended(self) -> int | None:
        """Exit code, once it has ended."""
        return None if self.process is None else self.process.poll()

    def last_words(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace")[-400:] if path.exists() else ""

    async def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = STOP_S) -> int:
        """Ask it to end; return its exit code. One that does not end is killed, and TimeoutError raised."""
        assert self.process is not None
        self.signal(number)
        try:
            end = time.monotonic() + within_s
            while self.process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(0.02)
            if self.process.poll() is None:
                raise TimeoutError(f"did not end within {within_s:g} s of {number.name}")
            return self.process.returncode
        finally:
            self.kill()

    def kill(self) -> None:
        """End the server and every engine that it started."""
        for pid in [self.pid, *self.pids] if self.process is not None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(60)
        if self.log is not None:
            self.log.deaf.clear()
            self.log.join()

    def signal(self, number: Signals) -> None:
        os.kill(self.pid, number)

    # Questions -----------------------------------------------------------------------------------------------------

    def engine_pid(self) -> int | None:
        """Return the engine's process id, or None. It is remembered for the end."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                if "treadle.engine.child" in child.cmdline():
                    self.pids.add(child.pid)
                    return child.pid
        return None

    def signal_engine(self, number: Signals) -> int | None:
        """Send a signal to the engine's process; return its pid, or None without one."""
        pid = self.engine_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    def orphans(self) -> list[int]:
        """Return engines that still run though the server has ended."""
        return [pid for pid in self.pids if _is_running(pid)]

    async def status(self) -> dict[str, Any]:
        """Return `/v1/status`. Raises OSError or TimeoutError."""
        _, body = await self.door.get("/v1/status")
        answer: dict[str, Any] = json.loads(body)
        return answer

    async def metrics(self) -> dict[str, float]:
        """Return every sample of `/metrics`, by name and labels."""
        _, body = await self.door.get("/metrics")
        lines = [line for line in body.decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def raise_own_limit() -> None:
    """Raise this process's limit of descriptors to its clients' need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OWN_FILES if hard == resource.RLIM_INFINITY else min(hard, OWN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
