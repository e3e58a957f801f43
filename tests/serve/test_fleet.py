"""`treadle fleet` as a user has it: workers and the real gateway, one of them killed, all of them stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.conftest import Tiny
from tests.serve.server import ENDLESS, gone, until
from treadle.processes import free_port

START_S = 90.0
SECRET = "secret-of-this-test-0123456789abcdef"
TOKEN = "token-of-this-test-0123456789"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Running:
    """A fleet of two in a process of its own."""

    def __init__(
        self, model: Path, log: Path, *options: str, key: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._log = log
        command = [sys.executable, "-m", "treadle", "fleet", str(model), "--replicas", "2", "--port", str(self.port)]
        self.logs = log.parent / "logs"
        command += ["--drain", "2", "--logs", str(self.logs), *options, "--"]
        command += ["--threads", "1", "--served-model-name", "m"]
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
                env={**os.environ, "TREADLE_API_KEY": key, **(env or {})},
            )
        self.members: set[int] = set()

    @property
    def said(self) -> str:
        return self._log.read_text()

    def look(self) -> set[int]:
        """Everyone who runs now; remembered for the end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.members |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        return self.members

    def says(self, text: str) -> None:
        def found() -> bool:
            self.look()
            assert self.process.poll() is None, self.said
            return text in self.said

        until(text, found, START_S)

    def chat(self, key: str = "") -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = BODY | {"max_tokens": 4}
        return httpx.post(self._url, json=body, headers=headers, timeout=60, trust_env=False).status_code

    @contextlib.contextmanager
    def streaming(self) -> Iterator[Iterator[str]]:
        """The lines of an endless stream."""
        body = BODY | {"max_tokens": ENDLESS, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=60, trust_env=False) as response:
            yield (line for line in response.iter_lines() if line)

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/chat/completions"


@pytest.fixture
def fleet(tiny: Tiny, tmp_path: Path) -> Iterator[Running]:
    with started(Running(tiny("llama"), tmp_path / "log")) as running:
        yield running


@pytest.fixture(scope="module")
def fleet_with_key(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Fleet open to the network, with a key and a token of the hub. The last test that uses it kills it."""
    log = tmp_path_factory.mktemp("fleet") / "log"
    with started(Running(tiny("llama"), log, "--host", "0.0.0.0", key=SECRET, env={"HF_TOKEN": TOKEN})) as running:
        yield running


@contextlib.contextmanager
def started(running: Running) -> Iterator[Running]:
    """It is ready; nothing of it is left at the end."""
    try:
        running.says("Ready at")
        yield running
    finally:
        running.look()
        running.process.kill()
        running.process.wait(60)
        for pid in running.members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_that_is_killed_comes_back_and_a_stop_ends_everyone(fleet: Running) -> None:
    """E3, F8"""
    assert fleet.chat() == 200
    worker = next(child.pid for child in psutil.Process(fleet.process.pid).children() if "serve" in child.cmdline())
    os.kill(worker, signal.SIGKILL)
    assert [fleet.chat() for _ in range(4)] == [200] * 4
    fleet.says("had ended (killed by SIGKILL) and is started again")
    until("both healthy again", lambda: fleet.said.count("ready, healthy to the gateway") >= 3, START_S)
    fleet.look()
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.process.wait(60) == 0
    assert "Stopped" in fleet.said
    assert all(map(gone, fleet.members))


def test_a_second_signal_ends_all_of_it_soon_and_workers_tell_their_clients(fleet: Running) -> None:
    """C3: the last word of a worker comes through the gateway."""
    with fleet.streaming() as data:
        next(data)
        fleet.process.send_signal(signal.SIGTERM)
        until("draining", lambda: "Shutting down" in fleet.said)
        fleet.look()
        fleet.process.send_signal(signal.SIGTERM)
        rest = [*data]
    assert any("server is stopping" in line for line in rest), rest[-3:]
    assert fleet.process.wait(60) == 128 + signal.SIGTERM
    assert all(map(gone, fleet.members))
    lines = [line for log in fleet.logs.glob("worker-*.log") for line in log.read_text().splitlines()]
    assert ["error=server_stopping" in line for line in lines if "method=GRPC" in line] == [True]


def test_a_fleet_with_a_key_opens_to_the_network_and_asks_for_it(fleet_with_key: Running) -> None:
    """S1: D14, the key in the environment is the fleet's own."""
    fleet = fleet_with_key
    assert (fleet.chat(), fleet.chat("wrong"), fleet.chat(SECRET)) == (401, 401, 200)
    assert "access: anyone who reaches these addresses, with an API key" in fleet.said
    assert SECRET not in fleet.said


def shown(pids: set[int], kind: str) -> Iterator[tuple[int, bytes]]:
    """The command lines or environments of processes, as /proc shows them."""
    for pid in pids:
        try:
            yield pid, Path(f"/proc/{pid}/{kind}").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_fleets_key_is_in_no_command_line_and_in_no_environment_but_its_workers(fleet_with_key: Running) -> None:
    """D14, D25: the gateway, and the workers' engines, have it in neither; nor the hub's token."""
    fleet = fleet_with_key
    everyone = {fleet.process.pid, *fleet.look()}
    workers = {child.pid for child in psutil.Process(fleet.process.pid).children() if "serve" in child.cmdline()}
    assert len(workers) == 2
    assert len(everyone) >= 6, "the fleet, its gateway, two workers with an engine each"
    assert not [pid for pid, data in shown(everyone, "cmdline") if SECRET.encode() in data]
    with_key = {pid for pid, data in shown(everyone - {fleet.process.pid}, "environ") if SECRET.encode() in data}
    assert with_key == workers
    with_token = {pid for pid, data in shown(everyone - {fleet.process.pid}, "environ") if TOKEN.encode() in data}
    assert with_token == workers
    assert not [log for log in fleet.logs.iterdir() if SECRET in log.read_text("utf-8", "replace")]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere members outlive a fleet that is killed")
def test_a_fleet_that_is_killed_takes_everyone_along(fleet_with_key: Running) -> None:
    fleet_with_key.look()
    fleet_with_key.process.kill()
    until("nobody left", lambda: all(map(gone, fleet_with_key.members)), 30)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treadle", "fleet", *arguments], capture_output=True, text=True, timeout=90, check=False
    )


def test_a_fleet_that_can_t_start_says_why_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    port = str(free_port())
    wrong = run("--replicas", "0")
    assert (wrong.returncode, "give 1 to 64" in wrong.stderr) == (2, True)
    unasked = run("--host", "0.0.0.0", str(tmp_path / "none"))
    assert (unasked.returncode, "give --no-auth" in unasked.stderr) == (2, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = run(str(tiny("llama")), "--port", str(taken.getsockname()[1]), "--logs", str(tmp_path / "logs"))
    assert (busy.returncode, "can't listen on 127.0.0.1:" in busy.stderr) == (2, True)
    assert not list((tmp_path / "logs").iterdir())  # no worker was started
    missing = run(str(tmp_path / "none"), "--port", port)
    assert missing.returncode == 1
    assert "ended while it started: exit code" in missing.stderr.splitlines()[-1]
