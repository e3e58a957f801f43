"""Servers that the clients run against: the scripted agent, and a tiny random model on the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clients import agent, recorded
from benchmarks.clients.programs import MODEL, PROGRAMS, Place
from benchmarks.clients.results import ROOT
from tests.support.tiny import make_tiny
from tests.support.vision_folder import make_vision_chat

from treadle.processes import free_port

START_S = 120
CONTEXT = 1 << 20
TINY_CONTEXT = 1 << 14


@contextmanager
def agent_server(folder: Path, path: str) -> Iterator[Place]:
    """Context manager of the scripted agent; yields the place for programs."""
    model = make_tiny(folder / "model", context=CONTEXT, added=agent.ADDED, chat_template=agent.TEMPLATE)
    scripts = folder / "scripts.json"
    blank = Place(folder, "", folder / "server.log", scripts, path)
    played = {p.marker: p.script(blank.project(p)) for p in PROGRAMS}
    played |= {one["marker"]: recorded.script(one) for one in recorded.recordings()}
    environment = agent.write_scripts(scripts, played)
    command = ["-m", "benchmarks.clients.agent", "serve", str(model), "--served-model-name", MODEL]
    with serving(command, blank.log, environment) as url:
        yield Place(folder, url, blank.log, scripts, path)


@contextmanager
def tiny_server(folder: Path, log: Path) -> Iterator[str]:
    """Context manager of a server of a tiny random model; yields its base URL. Names of models are demanded, as by
    OpenAI's API. Answers are greedy where a client gives no temperature, so that every run has the same ones."""
    make_tiny(folder, context=TINY_CONTEXT)
    with _greedy(folder, log) as url:
        yield url


@contextmanager
def vision_server(folder: Path, log: Path) -> Iterator[str]:
    """Context manager of a server like `tiny_server`, of a tiny random Qwen3-VL. Bytes that UTF-8 does not have end its
    answers: with one end token they would seldom end."""
    make_vision_chat(folder, context=TINY_CONTEXT, ends=[192, 193, 245, *range(251, 256)])
    with _greedy(folder, log) as url:
        yield url


@contextmanager
def _greedy(folder: Path, log: Path) -> Iterator[str]:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}), encoding="utf-8")
    with serving(["-m", "treadle", "serve", str(folder), "--require-model"], log, {}) as url:
        yield url


@contextmanager
def serving(arguments: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Context manager of a Treadle server; yields its base URL."""
    port = free_port()
    command = [sys.executable, *arguments, "--port", str(port), "--log-format", "json"]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)]))
    with log.open("wb") as file, started(command, {**os.environ, **environment, "PYTHONPATH": paths}, file) as server:
        url = f"http://127.0.0.1:{port}"
        wait_until(f"{url}/health/ready", server, log)
        yield url


@contextmanager
def started(command: list[str] | str, environment: Mapping[str, str], log: object) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager of a process that ends with the block."""
    shell = isinstance(command, str)
    process = subprocess.Popen(command, env=dict(environment), stdout=log, stderr=log, shell=shell)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a URL answers. Exits the program if the server ends before, or does not start in time."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    sys.exit(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
