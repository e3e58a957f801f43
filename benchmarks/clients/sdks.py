"""Chats, structured output and tool calls through the SDKs of this Python and of a folder of JavaScript packages.

    python -m benchmarks.clients.sdks --url http://127.0.0.1:8000/v1 [--only WORD] [--json FILE]

Runs against any server. Needs the SDKs, and nothing of Treadle: an environment of their own. Packages that are missing
are named. Exit code 1 if a case failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients import chats, structured
from benchmarks.clients.chats import Server
from benchmarks.clients.results import ROOT, Row

Job = tuple[str, str, str, str | Path, str, Callable[[Server], None]]
"""Client, API, case, needed package, distribution whose version counts, and the case itself."""
STRUCTURED_TOKENS = 800
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables for clients that would ask the internet when they are imported."""
DISTRIBUTIONS = {"pydantic_ai": "pydantic_ai_slim"}
LIMIT_S = 600.0
"""Longest time of a case, with the import of its packages."""


def jobs(modules: Path) -> Iterator[Job]:
    """Yield all cases."""
    for case in chats.cases(modules):
        yield case.client, case.api, f"chat: {case.way}", case.need, str(case.need), partial(chats.check, case)
    for client, need, cases in structured.CLIENTS:
        if chats.installed(need):
            for name, check in cases():
                yield client, "chat", name, need, DISTRIBUTIONS.get(need, need), check
        else:
            yield client, "chat", "all", need, need, lambda server: None


class Overdue(BaseException):
    """A case that took too long. Clients pass it on: they handle Exception."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Context manager that raises Overdue in the main thread after that time, and writes all stacks to stderr."""

    def stop(_signal: int, frame: Any) -> None:
        faulthandler.dump_traceback()
        raise Overdue(f"no end within {seconds:g} s, in {frame.f_code.co_filename}:{frame.f_lineno}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def confine(url: str) -> list[tuple[Any, ...]]:
    """Refuse this process all connections but those to the server of a URL, and look-ups of other names. Returns the
    places that are refused from now on, in a list that grows.

    A client that asks another place, such as Ollama's port on this machine or a list of prices on the internet, would
    wait for whatever is there.
    """
    place = urlsplit(url)
    allowed: set[tuple[Any, ...]] = {(place.hostname, place.port)}
    allowed |= {found[4][:2] for found in socket.getaddrinfo(place.hostname, place.port)}
    refused: list[tuple[Any, ...]] = []

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("socket.connect", "socket.getaddrinfo"):
            return
        address = arguments[1] if event == "socket.connect" else arguments
        if isinstance(address, tuple) and address[:2] not in allowed:
            refused.append(address[:2])
            raise ConnectionRefusedError(f"{address[0]}:{address[1]} is not the server under test")

    sys.addaudithook(check)
    return refused


def row(job: Job, server: Server, refused: list[tuple[Any, ...]], limit_s: float) -> Row:
    """Run a case. It fails if it takes longer than the limit, or adds to the `refused` connections."""
    client, api, case, need, distribution, check = job
    began, error = time.perf_counter(), ""
    refused.clear()
    try:
        with within(limit_s):
            check(server)
        assert not refused, f"it asked others than the server: {refused}"
    except (Exception, Overdue) as failure:  # any error of a client is its result
        error = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    version = chats.version(need if isinstance(need, Path) else distribution)
    return Row("sdk", client, version, api, case, not error, error, round(time.perf_counter() - began, 2))


def run(python: Path, modules: Path, url: str, model: str, only: str = "", limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run the cases in the environment of `python`, with a home of their own; return the "rows" and the "missing"
    clients. `url` is the server's address without /v1. The environment's programs come first, its node above all.
    """
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "rows.json")
        command = [str(python.absolute()), "-m", "benchmarks.clients.sdks", "--url", f"{url}/v1", "--model", model]
        command += ["--json", str(file), "--only", only, "--node-modules", str(modules.resolve())]
        command += ["--limit", str(limit_s)]
        path = os.pathsep.join([str(python.absolute().parent), os.environ["PATH"]])
        subprocess.run(command, cwd=ROOT, env={"HOME": home, "PATH": path, **OFFLINE}, check=False)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def served_model(url: str, key: str) -> str:
    """Return the first model that a server lists."""
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--key", default="none", help="the API key, where the server has one")
    parser.add_argument("--only", default="", metavar="WORD", help="clients with this in their name")
    parser.add_argument("--node-modules", type=Path, default=Path("node_modules"), metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="longest time of a case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["OLLAMA_API_BASE"] = options.url.removesuffix("/v1")  # where litellm asks what a model can do
    model = options.model or served_model(options.url, options.key)
    rows, missing, refused = [], set(), confine(options.url)
    for job in jobs(options.node_modules):
        if options.only not in job[0]:
            continue
        if not chats.installed(job[3]):
            missing.add(job[0])
            continue
        tokens = 16 if job[2].startswith("chat: ") else STRUCTURED_TOKENS
        rows.append(row(job, Server(options.url, model, options.key, tokens), refused, options.limit))
        print(rows[-1].line(), flush=True)
    if missing:
        print(f"Not installed: {', '.join(sorted(missing))}")
    if options.json:
        found = {"rows": [asdict(one) for one in rows], "missing": sorted(missing)}
        options.json.write_text(json.dumps(found), encoding="utf-8")
    sys.exit(not rows or any(not one.passed for one in rows))


if __name__ == "__main__":
    main()
