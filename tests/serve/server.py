"""A real `treadle serve` in a process of its own, and what a test asks of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serve.events import Stream

LISTENS = re.compile(r"listens on (http://\S+)")
START_S = 120.0
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
ENDLESS = 90_000
"""`max_tokens` of a stream that outlives its test: the models' contexts leave room for it."""


def until(what: str, found: Callable[[], Any], within_s: float = 120.0, every_s: float = 0.02) -> Any:
    """The first true value of `found`, asked again and again within a bound."""
    end = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(every_s)
    return value


def gone(pid: int) -> bool:
    """The process has ended, whether or not somebody has reaped it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def runs(pid: int, module: str) -> bool:
    """Whether the process runs this module."""
    try:
        return module in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


class Serve:
    """Use as a context manager: at its end the server and its child are gone, however the test ended."""

    def __init__(
        self,
        model: Path | str,
        *options: str,
        log: Path,
        env: dict[str, str] | None = None,
        terminal: int | None = None,
        prefix: Sequence[str] = (),
        module: str = "treadle",
    ) -> None:
        """Its standard error goes to `log`. With `terminal`, the end of a pty, it has that as its terminal. `prefix` is
        a command that runs it, such as nohup; `module`
        stands in for treadle's own main."""
        command = [
            *prefix,
            sys.executable,
            "-m",
            module,
            "serve",
            str(model),
            "--port",
            "0",
            "--threads",
            "1",
            *options,
        ]
        if terminal is not None:
            command = [sys.executable, "-c", TAKE_TERMINAL, *command]
        self.http = httpx.Client(timeout=60, trust_env=False)
        self._log = log
        self._children: set[int] = set()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Serve:
        return self

    def __exit__(self, *error: object) -> None:
        self.children()
        self.process.kill()
        self.process.wait(60)
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.http.close()

    # Life --------------------------------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        """Everything on standard error so far."""
        return self._log.read_text()

    @property
    def url(self) -> str:
        found: re.Match[str] = self._alive("a line with the URL", lambda: LISTENS.search(self.said))
        return found[1]

    def ready(self) -> Serve:
        """Returns once the server takes requests. It loads for seconds, and each question takes milliseconds of it."""
        self._alive("ready", self.is_ready, every_s=0.1)
        return self

    def is_ready(self) -> bool:
        return self.get("/health/ready").status_code == 200

    def stopped(self, within_s: float = 20.0) -> int:
        """The exit code, once the process has ended."""
        return self.process.wait(within_s)

    def children(self) -> set[int]:
        """Every process that it started and that runs now; those seen earlier are remembered for the end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            alive = {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
            self._children |= alive
            return alive
        return set()

    def engines(self) -> set[int]:
        """The engine's process, if there is one now."""
        return {pid for pid in self.children() if runs(pid, "treadle.engine.child")}

    def child(self) -> int:
        """The engine's process."""
        (pid,) = until("an engine process", self.engines)
        return int(pid)

    def never_ready(self, within_s: float = 60.0) -> int:
        """Asserts that it says it is not ready for as long as it runs, and that it ends; how often it said so."""
        asked = 0

        def ended() -> bool:
            nonlocal asked
            with contextlib.suppress(httpx.TransportError):
                assert self.get("/health/ready").status_code == 503
                asked += 1
            return self.process.poll() is not None

        until("the end", ended, within_s, every_s=0.1)
        return asked

    def childless(self, within_s: float = 5.0) -> None:
        """Asserts that no process this server started is left."""
        until("the end of the child", lambda: all(map(gone, self._children)), within_s)

    def _alive(self, what: str, found: Callable[[], Any], every_s: float = 0.02) -> Any:
        def look() -> Any:
            value = None
            with contextlib.suppress(httpx.TransportError):
                value = found()
            assert value or self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said}"
            return value

        return until(what, look, START_S, every_s)

    # Questions -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/v1/status").json()
        return answer

    def state(self) -> str:
        state: str = self.get("/health/ready").json()["state"]
        return state

    def idle(self, within_s: float = 20.0) -> None:
        """Asserts that every slot and every place comes free."""
        until("idle", lambda: self.status()["admission"]["rows"] == 0, within_s)

    def complete(self, prompt: str | list[int] = "hello", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
        return self.http.post(f"{self.url}/v1/completions", json=body)

    @contextlib.contextmanager
    def stream(self, prompt: str | list[int] = "hello", **fields: Any) -> Iterator[Stream]:
        """A stream on a connection of its own; its first token has come."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": ENDLESS, "return_token_ids": True, **fields}
        with (
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body | {"stream": True}) as response,
        ):
            assert response.status_code == 200, response.read()
            stream = Stream(response)
            stream.next()
            yield stream
