"""Floods of connections against a real `treadle serve` with few descriptors: answers to other clients, and costs.

    python benchmarks/floods.py MODEL [--only NAME ...] [--patience SECONDS]

Each attack starts a server with a limit of open files (`ulimit -n`) and holds its connections while it measures:

connects    600 silent HTTP connections at a limit of 512
bursts      4,020 silent HTTP connections at a limit of 4,096, then bursts of 500 for five seconds
grpc        700 bare TCP connections to the gRPC port at a limit of 512
watch       5,000 `grpc.health.v1` Watch streams on one connection
unfinished  one connection whose request was answered before its body came, then one byte every two seconds
crlf        one connection that was answered, then an empty line every two seconds
keyless, wrong key, right key
            1,000 open gRPC calls of one peer on one connection that never send their message; `five`: on five
others      each further attack of `raw_grpc.py`: resets, pings, settings, metadata, windows of zero...

Attacks over gRPC also measure another peer's calls: the note has the number of 100 GetModelInfo and 20 Generate calls
that were done within 5 s, and their p50 and p99 in ms. `live` is the number of 40 probes of /health/live that were
answered within 2 s; `restart` is the time from a kill of the engine's process until the server was ready again; `log`
are the bytes that the attack added to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import raw_grpc

PROBES = 40
PROBE_S = 2.0
RESTART_S = 30.0
START_S = 120.0
STREAMS = 5000
KEY = "a-key-for-the-floods"
ATTACKER = "127.0.0.2"
ATTACK_S = 5.0
OTHER_CALL_S = 5.0
HTTP_URL = re.compile(r"listens on http://([\d.]+):(\d+)")
GRPC_URL = re.compile(r"grpc://([\d.]+):(\d+)")
CURL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Figures:
    """Figures of one attack. `held` is the number of its connections that the server kept open."""

    name: str
    sent: int = 0
    held: int = 0
    live: list[float] = field(default_factory=list)
    probes: int = 0
    restart_s: float | None = None
    ended: int | None = None
    log_bytes: int = 0
    note: str = ""

    @property
    def row(self) -> str:
        times = sorted(1000 * seconds for seconds in self.live)
        p50, worst = (f"{statistics.median(times):.1f}", f"{times[-1]:.0f}") if times else ("", "")
        restart = "never" if self.restart_s is None else f"{self.restart_s:.1f}"
        state = "runs" if self.ended is None else f"ended, exit {self.ended}"
        cells = (self.name, self.sent, self.held, f"{len(times)}/{self.probes}", p50, worst, restart, state)
        return " | ".join(["", *map(str, cells), f"{self.log_bytes:,}", self.note, ""]).strip()


HEAD = (
    "| attack | connections | held | live | live p50, ms | max, ms | restart, s | server | log, bytes | note |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


class Attack(Protocol):
    def __call__(self, server: Served, figures: Figures, patience_s: float) -> list[Any]: ...


class Served:
    """A server in a process of its own, with a limit of `open_files`."""

    def __init__(self, model: str, open_files: int, folder: Path, key: str = "") -> None:
        """With a `key`, gRPC requires it of every client."""
        self._log = folder / "stderr.log"
        command = [sys.executable, "-m", "treadle", "serve", model, "--port", "0", "--grpc-port", "0", "--threads", "1"]
        self.key = key
        with self._log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--grpc-auth"] if key else command,
                env=os.environ | ({"TREADLE_API_KEY": key} if key else {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files)),
                start_new_session=True,
            )

    def __enter__(self) -> Served:
        end = time.monotonic() + START_S
        while not (HTTP_URL.search(self.output) and self.get("/health/ready") == 200):
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{self.output}")
            time.sleep(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def log_bytes(self) -> int:
        return self._log.stat().st_size

    def address(self, url: re.Pattern[str] = HTTP_URL) -> tuple[str, int]:
        found = url.search(self.output)
        assert found is not None
        return found[1], int(found[2])

    def get(self, path: str) -> int | None:
        """Return the status of a GET on a new connection; None if none came within PROBE_S."""
        host, port = self.address()
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
            with CURL.open(request, timeout=PROBE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except (OSError, ValueError):
            return None

    def restart(self) -> float | None:
        """Kill the engine; return the seconds until the server is ready again, or None."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                os.kill(child.pid, signal.SIGKILL)
        began = time.monotonic()
        time.sleep(0.3)
        while time.monotonic() - began < RESTART_S and self.process.poll() is None:
            if self.get("/health/ready") == 200:
                return time.monotonic() - began
            time.sleep(0.1)
        return None


def connects(server: Served, figures: Figures, patience_s: float) -> list[Any]:
    figures.sent = 600
    return _connect(server.address(), figures.sent)


def bursts(server: Served, figures: Figures, patience_s: float) -> list[Any]:
    held = _connect(server.address(), 4020)
    figures.sent = 4020
    end = time.monotonic() + 5
    while time.monotonic() < end:
        burst = _connect(server.address(), 500)
        figures.sent += len(burst)
        for sock in burst:
            sock.close()
    return held


def grpc(server: Served, figures: Figures, patience_s: float) -> list[Any]:
    figures.sent = 700
    return _connect(server.address(GRPC_URL), figures.sent)


def unfinished(server: Served, figures: Figures, patience_s: float) -> list[Any]:
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    return _trickle(server, figures, head, b"x", patience_s)


def crlf(server: Served, figures: Figures, patience_s: float) -> list[Any]:
    return _trickle(server, figures, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n", patience_s)


def watch(server: Served, figures: Figures, patience_s: float) -> list[Any]:
    """Hold the streams in a process of their own, as they would slow the probes down here."""
    host, port = server.address(GRPC_URL)
    holder = subprocess.Popen(
        [sys.executable, __file__, "--hold-watches", f"{host}:{port}"], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert holder.stdout is not None
    figures.sent = 1
    figures.note = holder.stdout.readline().decode().strip()
    return [holder]


def raw(attack: str, key: str = KEY) -> Attack:
    """Return an attack of `raw_grpc.py` from ATTACKER with `key`, which also measures another peer's calls."""

    def run(server: Served, figures: Figures, patience_s: float) -> list[Any]:
        host, port = server.address(GRPC_URL)
        address = f"{host}:{port}"
        command = [sys.executable, str(Path(__file__).with_name("raw_grpc.py")), attack, address, ATTACKER, key]
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(ATTACK_S)
        figures.note = asyncio.run(_other_calls(address))
        return [holder]

    return run


ATTACKS: dict[str, tuple[int, Attack]] = {
    "connects": (512, connects),
    "bursts": (4096, bursts),
    "grpc": (512, grpc),
    "watch": (4096, watch),
    "unfinished": (512, unfinished),
    "crlf": (512, crlf),
    "keyless": (4096, raw("opened", "")),
    "wrong key": (4096, raw("opened", "wrong")),
    "right key": (4096, raw("opened")),
    "five keyless": (4096, raw("opened_5000", "")),
    "five of a wrong key": (4096, raw("opened_5000", "wrong")),
    "five of a right key": (4096, raw("opened_5000")),
    **{name: (4096, raw(name)) for name in raw_grpc.ATTACKS if not name.startswith("opened")},
}
NAMED = ["connects", "bursts", "grpc", "watch", "unfinished", "crlf"]


def _connect(address: tuple[str, int], count: int) -> list[socket.socket]:
    """Open silent connections, without waiting for a server whose queue is full."""
    found = []
    for _ in range(count):
        sock = socket.socket()
        sock.settimeout(1.0)
        found.append(sock)
        with contextlib.suppress(OSError):
            sock.connect(address)
    return found


def _trickle(server: Served, figures: Figures, head: bytes, drop: bytes, patience_s: float) -> list[Any]:
    """Send `head`, read the answer, then send `drop` repeatedly; note the end of the connection."""
    figures.sent = 1
    sock = socket.create_connection(server.address())
    sock.sendall(head)
    sock.settimeout(2.0)
    sock.recv(65536)
    began = time.monotonic()
    while time.monotonic() - began < patience_s:
        try:
            sock.sendall(drop)
            if sock.recv(65536) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    lasted = time.monotonic() - began
    figures.note = f"ended after {lasted:.0f} s" if lasted < patience_s else f"still open after {lasted:.0f} s"
    return [sock]


def _open(held: list[Any]) -> int:
    """Count the connections that the server has not closed."""
    count = 0
    for sock in held:
        if isinstance(sock, socket.socket):
            sock.setblocking(False)
            try:
                count += sock.recv(65536) != b"" and sock.recv(65536) != b""
            except BlockingIOError:
                count += 1
            except OSError:
                pass
    return count


def run(name: str, model: str, patience_s: float, print_row: Callable[[str], None]) -> None:
    """Run one attack and print its row."""
    limit, attack = ATTACKS[name]
    figures = Figures(name)
    key = "" if name in NAMED else KEY
    with tempfile.TemporaryDirectory() as folder, Served(model, limit, Path(folder), key) as server:
        before = server.log_bytes
        held = attack(server, figures, patience_s)
        try:
            _measure(server, figures)
            figures.held = _open(held)
        finally:
            for one in held:
                one.kill() if isinstance(one, subprocess.Popen) else one.close()
        figures.ended = server.process.poll()
        figures.log_bytes = server.log_bytes - before
    print_row(figures.row)


def _measure(server: Served, figures: Figures) -> None:
    for _ in range(PROBES):
        figures.probes += 1
        began = time.monotonic()
        if server.get("/health/live") == 200:
            figures.live.append(time.monotonic() - began)
        elif figures.probes - len(figures.live) >= 5:
            break  # five without an answer suffice
        time.sleep(0.02)
    figures.restart_s = server.restart()


async def _other_calls(address: str) -> str:
    """Measure calls of another peer, with the right key."""
    import grpc
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc

    metadata = (("authorization", f"Bearer {KEY}"),)

    async def info(stub: Any, number: int) -> None:
        await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata, timeout=OTHER_CALL_S)

    async def generate(stub: Any, number: int) -> None:
        request = pb.GenerateRequest(
            request_id=f"other-{number}",
            tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
            sampling_params=pb.SamplingParams(max_tokens=1),
        )
        async for _ in stub.Generate(request, metadata=metadata, timeout=OTHER_CALL_S):
            pass

    output = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for name, call, count in (("info", info, 100), ("generate", generate, 20)):
            times, codes = [], set()
            for number in range(count):
                began = time.monotonic()
                try:
                    await call(stub, number)
                    times.append(1000 * (time.monotonic() - began))
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code().name)
                    if number - len(times) >= 4:
                        break
            times.sort()
            late = f" p50 {statistics.median(times):.1f} p99 {times[int(0.99 * len(times))]:.1f}" if times else ""
            output.append(f"{name} {len(times)}/{count}{late} {' '.join(sorted(codes))}".strip())
    return "; ".join(output)


async def _hold_watches(address: str) -> None:
    """Open STREAMS Watch streams on one connection, print the number answered, and hold them."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(STREAMS)]
        answers = [asyncio.ensure_future(call.read()) for call in calls]
        done, _ = await asyncio.wait(answers, timeout=8)
        answered = sum(1 for task in done if task.exception() is None)
        print(f"{answered} of {STREAMS} streams answered, {len(done) - answered} refused", flush=True)
        await asyncio.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--patience", type=float, default=100.0, help="seconds that one connection is watched")
    parser.add_argument("--hold-watches", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold_watches:
        asyncio.run(_hold_watches(options.hold_watches))
        return
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(HEAD)
    for name in options.only:
        run(name, options.model, options.patience, lambda row: print(row, flush=True))


if __name__ == "__main__":
    main()
