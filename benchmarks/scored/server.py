"""Server under test: its processes, requests to it, and its resources."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ..client import Reply, Target

READY_S = 120.0
PEERS = {"mlx-lm": "/health", "vllm-mlx": "/health", "vllm-mlx-batched": "/health"}


@dataclass(frozen=True)
class Resources:
    """Resources of a server's processes together; `rss` in bytes."""

    descriptors: int
    threads: int
    rss: int


@dataclass
class Server:
    """One server process on a free port. `command` has {port} in it; `probe` is a route that costs it nothing; requests
    carry `key`, if there is one."""

    name: str
    command: str
    probe: str
    log: Path
    variables: dict[str, str] = field(default_factory=dict)
    key: str = ""
    model: str = ""
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def own(self) -> bool:
        """Whether it is Treadle, which reports more about itself than other servers."""
        return self.name == "treadle"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def grpc(self) -> str:
        """Address of Treadle's gRPC port, which the operating system chose."""
        found = re.findall(r"grpc://([\w.:\[\]]+)", self.log.read_text())
        if not found:
            raise SystemExit(f"the server named no gRPC address: see {self.log}")
        return str(found[-1])

    @property
    def target(self) -> Target:
        return Target("127.0.0.1", self.port)

    async def start(self) -> float:
        """Start it; return the seconds until it answered a generation request."""
        self.port = free_port()
        began = time.perf_counter()
        self.process = self._launch()
        while time.perf_counter() - began < READY_S:
            if not self.is_running:
                raise SystemExit(f"{self.name} ended with {self.process.returncode}: see {self.log}")
            self.model = self.model or await self._served_model()
            if self.model and (await self.generate("Hello", 1, within_s=10.0)).status == 200:
                return time.perf_counter() - began
            await asyncio.sleep(0.1)
        await self.stop()
        raise SystemExit(f"{self.name} was not ready within {READY_S:g} s: see {self.log}")

    async def _served_model(self) -> str:
        """Return the served model's name; empty before it answers."""
        reply = await self.get("/v1/models")
        return str(reply.json()["data"][0]["id"]) if reply.status == 200 else ""

    def _launch(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["bash", "-c", "exec env " + self.command.format(port=self.port)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )

    async def generate(
        self,
        prompt: str,
        tokens: int,
        *,
        within_s: float = 60.0,
        leave_after: float | int | None = None,
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> Reply:
        """Return one streamed greedy completion; its status is 0 if the server can't be reached, or is silent for too
        long."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **more}
        all_headers = {**self.headers, **(headers or {})}
        return await answered(
            self.target.post("/v1/completions", body, leave_after=leave_after, headers=all_headers), within_s
        )

    async def get(self, path: str, *, within_s: float = 10.0) -> Reply:
        return await answered(self.target.get(path, headers=self.headers), within_s)

    async def status(self) -> dict[str, Any]:
        """Return Treadle's `/v1/status`."""
        found: dict[str, Any] = (await self.get("/v1/status")).json()
        return found

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tree(self) -> list[psutil.Process]:
        """Return its processes, the first one first."""
        assert self.process is not None
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resources(self) -> Resources:
        descriptors = threads = rss = 0
        for process in self.tree():
            try:
                descriptors += process.num_fds()
                threads += process.num_threads()
                rss += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return Resources(descriptors, threads, rss)

    def engine(self) -> psutil.Process:
        """Return Treadle's engine process."""
        return next(process for process in self.tree() if "treadle.engine.child" in " ".join(process.cmdline()))

    async def stop(self) -> None:
        """End it and its children, by force if need be."""
        tree = self.tree() if self.is_running else []
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, 20)
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


async def answered(asking: Awaitable[Reply], within_s: float) -> Reply:
    """Await the reply; one with status 0 if none came."""
    try:
        async with asyncio.timeout(within_s):
            return await asking
    except TimeoutError:
        return Reply(error="no answer")
    except (OSError, ValueError, IndexError, EOFError) as error:
        return Reply(error=type(error).__name__)


def treadle(
    model: Path, log: Path, options: Sequence[str] = (), variables: dict[str, str] | None = None, key: str = ""
) -> Server:
    """Return Treadle as it is installed here, serving `model`."""
    arguments = [sys.executable, "-m", "treadle", "serve", str(model), "--port"]
    command = f"{shlex.join(arguments)} {{port}} {shlex.join(options)}"
    return Server("treadle", command, "/health/live", log, variables or {}, key)


def peer(name: str, model: Path, log: Path) -> Server:
    """Return a peer that `benchmarks/peers.py` has installed, with its defaults."""
    here = Path(__file__).parents[1] / "peers.py"
    done = subprocess.run(
        [sys.executable, str(here), "command", name, "--model", str(model)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return Server(name, done.stdout.strip(), PEERS[name], log)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
