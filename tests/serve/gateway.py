"""The real SMG gateway in a process of its own, in front of real workers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.serve.server import START_S, Serve, until
from treadle.processes import free_ports

SMG = Path(sys.executable).with_name("smg")
GRPC = re.compile(r"(grpc://\S+)")


def grpc_url(server: Serve) -> str:
    """Where a server that was started with `--grpc-port 0` serves gRPC."""
    found = until("a line with the gRPC address", lambda: GRPC.search(server.said), START_S)
    return str(found[1])


class Gateway:
    """Use as a context manager: the gateway has ended at its end."""

    def __init__(self, log: Path, *workers: str, options: tuple[str, ...] = ()) -> None:
        port, metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(timeout=60, trust_env=False, base_url=self.url)
        self._log = log
        command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
        command += ["--health-failure-threshold", "1", "--health-success-threshold", "1", *options]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--worker-urls", *workers],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait(60)
        self.http.close()

    def ready(self) -> Gateway:
        """Returns once it has a worker and a tokenizer."""
        until("a gateway that is ready", lambda: self._ok("/readiness"), START_S)
        return self

    @property
    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text("utf-8", "replace")

    def _ok(self, path: str) -> bool:
        assert self._process.poll() is None, self._log.read_text("utf-8", "replace")
        with contextlib.suppress(httpx.TransportError):
            return self.http.get(path).status_code == 200
        return False

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json={"model": "m", **body})

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    @contextlib.contextmanager
    def stream(self, text: str = "hello", **fields: Any) -> Iterator[Iterator[str]]:
        """The data of a chat's events."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True}
        with (
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", f"{self.url}/v1/chat/completions", json={**body, **fields}) as response,
        ):
            assert response.status_code == 200, response.read()
            yield (line[6:] for line in response.iter_lines() if line.startswith("data: "))
