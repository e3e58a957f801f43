"""Standard error that nobody reads, and an event loop that is stuck: the server answers, and ends, all the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import until

SMALL_PIPE = 4096
F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)
SERVE = (sys.executable, "-m", "treadle", "serve")
STUCK = """
import asyncio, sys, threading, time
from treadle.cli import serve
from treadle.telemetry import watchdog

def stick(settle=serve._freeze_loaded):
    settle()
    asyncio.get_running_loop().call_later(0.3, lambda: (print("STUCK", file=sys.stderr), time.sleep(600)))

serve._freeze_loaded = stick
serve.STUCK_S = float(sys.argv.pop(1))
watchdog.Watchdog.__init__.__kwdefaults__["stuck_s"] = serve.STUCK_S
from treadle.cli import main
main()
"""


class Unread:
    """A server whose standard error is a pipe that is read only on demand. `taken` is everything that was read."""

    def __init__(self, command: tuple[str, ...], model: Path, *options: str) -> None:
        self._read, write = os.pipe()
        if sys.platform == "linux":
            fcntl.fcntl(write, F_SETPIPE_SZ, SMALL_PIPE)
        self.taken = b""
        self.process = subprocess.Popen(
            [*command, str(model), "--port", "0", "--threads", "1", *options],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            start_new_session=True,
        )
        os.close(write)

    def read_until(self, pattern: str, within_s: float = 60.0) -> re.Match[str]:
        """Read on until `pattern` is there."""
        end = time.monotonic() + within_s
        while not (found := re.search(pattern, self.taken.decode())):
            assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], self.taken.decode()
            data = os.read(self._read, 65536)
            assert data, self.taken.decode()
            self.taken += data
        return found

    def rest(self) -> str:
        """Everything to the end of the process."""
        while data := os.read(self._read, 65536):
            self.taken += data
        return self.taken.decode()

    def ready(self) -> str:
        """The URL of the server once it is ready; it is read no further from here on."""
        url = self.read_until(r"listen\S* .*?(http://[\w.:]+)")[1]
        with httpx.Client(trust_env=False) as client:
            until("ready", lambda: self._is_ready(client, url), 60.0)
        return url

    def _is_ready(self, client: httpx.Client, url: str) -> bool:
        if select.select([self._read], [], [], 0)[0]:
            self.taken += os.read(self._read, 65536)
        return client.get(f"{url}/health/ready").status_code == 200

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait(60)
        os.close(self._read)


@contextlib.contextmanager
def unread(model: Path, *options: str, command: tuple[str, ...] = SERVE) -> Iterator[Unread]:
    server = Unread(command, model, *options)
    try:
        yield server
    finally:
        server.close()


def complete(client: httpx.Client, url: str) -> int:
    return client.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code


def test_a_standard_error_that_nobody_reads_stops_nothing(tiny: Tiny) -> None:
    """Requests are answered, the engine is replaced, SIGTERM drains, and the pipe is full all the while."""
    options = ("--log-level", "debug", "--log-format", "json")
    with unread(tiny("gemma3"), *options) as server, httpx.Client(trust_env=False, timeout=60) as client:
        url = server.ready()
        while client.get(f"{url}/v1/status").json()["log"]["queued_bytes"] < SMALL_PIPE:
            assert complete(client, url) == 200
        assert client.get(f"{url}/health/live", timeout=2).status_code == 200
        engine = client.get(f"{url}/v1/status").json()["engine"]
        os.kill(engine["pid"], signal.SIGKILL)
        until("a restart", lambda: client.get(f"{url}/v1/status").json()["engine"]["restarts"] == 1)
        until("ready", lambda: client.get(f"{url}/health/ready").status_code == 200)
        assert complete(client, url) == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


REQUESTS = 400


def test_dropped_lines_are_counted_and_told_of_once_somebody_reads(tiny: Tiny) -> None:
    """A line of 4 KB a request fills the queue soon."""
    path = "/v1/" + "x" * 4000
    with unread(tiny("gemma3"), "--log-level", "debug") as server, httpx.Client(trust_env=False, timeout=60) as client:
        url = server.ready()
        for _ in range(REQUESTS):
            assert client.get(url + path).status_code == 404
        log = client.get(f"{url}/v1/status").json()["log"]
        assert log["dropped_lines"] > 0
        assert 1 << 19 < log["queued_bytes"] <= 1 << 20
        scraped = re.search(r"^treadle_log_dropped_lines_total ([\d.]+)$", client.get(f"{url}/metrics").text, re.M)
        assert scraped is not None
        assert float(scraped[1]) >= log["dropped_lines"]
        told = server.read_until(r"lines of the log were dropped: .* dropped=(\d+)\n")
        assert int(told[1]) >= log["dropped_lines"]
        seen = server.taken.count(path.encode())
        assert log["dropped_lines"] <= REQUESTS - seen + 20  # beside them, lines of health checks
        assert complete(client, url) == 200
        server.read_until("path=/v1/completions")
        assert client.get(f"{url}/v1/status").json()["log"]["queued_bytes"] < SMALL_PIPE
        server.process.send_signal(signal.SIGTERM)
        assert server.rest().endswith("Stopped\n")
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_a_server_whose_loop_is_stuck(tiny: Tiny, number: signal.Signals) -> None:
    with unread(tiny("gemma3"), command=(sys.executable, "-c", STUCK, "600", "serve")) as server:
        server.read_until("STUCK")
        engine = psutil.Process(server.process.pid).children()
        server.process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.5)
        server.process.send_signal(number)
        assert server.process.wait(60) == 128 + number
        psutil.wait_procs(engine, timeout=60)
        assert not any(process.is_running() for process in engine)


@pytest.mark.parametrize("full", [False, True])
def test_a_loop_that_is_stuck_ends_the_process_with_the_stacks_of_its_threads(tiny: Tiny, full: bool) -> None:
    """Also when nobody reads what it says."""
    with unread(tiny("gemma3"), command=(sys.executable, "-c", STUCK, "2", "serve")) as server:
        server.read_until("STUCK")
        engine = psutil.Process(server.process.pid).children()
        said = "" if full else server.rest()
        assert server.process.wait(60) == 70
        if not full:
            assert "critical treadle.serve the event loop has not run for 2 s: the server ends" in said
            assert re.search(r"Current thread 0x.*\n(.*\n)*.*in <lambda>", said) or "in <lambda>" in said
        psutil.wait_procs(engine, timeout=60)
        assert not any(process.is_running() for process in engine)


def test_a_server_that_was_stopped_for_a_while_is_not_taken_for_stuck(tiny: Tiny) -> None:
    """A laptop that sleeps, a frozen container."""
    free = STUCK.replace("time.sleep(600)", "None")
    with unread(tiny("gemma3"), command=(sys.executable, "-c", free, "2", "serve")) as server:
        url = server.ready()
        server.process.send_signal(signal.SIGSTOP)
        until("it has stopped", lambda: psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(2.5)
        server.process.send_signal(signal.SIGCONT)
        with httpx.Client(trust_env=False, timeout=60) as client:
            assert complete(client, url) == 200
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(2.5)
            assert complete(client, url) == 200


def test_closed_standard_descriptors_stay_nobodys(start: Start, tiny: Tiny) -> None:
    """No socket takes their numbers, and the exit code is that of a clean end. tests/test_output_streams.py has each of
    them closed alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start(tiny("gemma3"), "--port", str(port), prefix=("sh", "-c", 'exec "$0" "$@" 0<&- 1>&- 2>&-'))
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return server.http.get(f"{url}/health/ready").status_code == 200
        return False

    until("ready", is_ready, 60.0)
    pids = [server.process.pid, *server.children()]
    for pid in pids:
        where = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)]
        assert not any(place.startswith("socket:") for place in where), where
    assert complete(server.http, url) == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.stopped() == 0
