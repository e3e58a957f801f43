"""One poisoner beside innocents: the cost of a request that kills the engine for other clients.

    python benchmarks/poisoner.py MODEL_FOLDER [--seconds 60] [--innocents 8] [--at 0] [--how SIGABRT] [--kill]

Starts `treadle serve` with a runner that dies of one token (tests/support/poison.py), sends that token repeatedly from
one client, as an SDK at its defaults would, and streams answers to innocents at the same time. Each innocent's
answer is held against a calm run's. `--kill` sends no poison: instead the engine gets SIGKILL every few seconds.

Prints requests by their ends, the share of time not ready, the longest pauses in streams, and the engine's deaths.
Run it with PYTHONPATH on another checkout's `src` to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
POISON = 77
READY_S = 120.0


def start(args: argparse.Namespace, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server on the given port; returns once it is ready."""
    token = -1 if args.kill else POISON
    poison = {"token": token, "at": args.at, "how": args.how, "beside": args.beside}
    command = [sys.executable, "-m", "tests.support.poison", "serve", str(args.model), "--port", str(args.port)]
    command += ["--threads", "1", "--hang-after", str(args.hang_after), *args.option]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TREADLE_TEST_POISON": json.dumps(poison)},
        stderr=log.open("wb"),
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{args.port}"
    end = time.monotonic() + READY_S
    while True:
        try:
            if httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200:
                return process, url
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.05)


def body(number: int, tokens: int) -> dict[str, Any]:
    """Return an innocent's request: the same for the same number."""
    prompt = [5 + (number * 7 + i) % 60 for i in range(40)]
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


class Counts:
    """Counts of requests by their ends."""

    def __init__(self) -> None:
        self.innocent: Counter[str] = Counter()
        self.poison: Counter[str] = Counter()
        self.pauses: list[float] = []
        self.probes = self.unready = 0


async def stream(client: httpx.AsyncClient, url: str, request: dict[str, Any], counts: Counts) -> tuple[str, list[int]]:
    """Read one streamed answer. Returns its end, and its tokens."""
    tokens: list[int] = []
    last = time.monotonic()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
            if response.status_code != 200:
                return await _refused(response), tokens
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return "done", tokens
                event = json.loads(line[6:])
                if "error" in event:
                    return event["error"]["code"], tokens
                counts.pauses.append(time.monotonic() - last)
                last = time.monotonic()
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
    except httpx.HTTPError as error:
        return type(error).__name__, tokens
    return "cut", tokens


async def _refused(response: httpx.Response) -> str:
    await response.aread()
    wait_s = float(response.headers.get("retry-after-ms", 0)) / 1000
    await asyncio.sleep(wait_s)
    return f"{response.status_code} {response.json()['error']['code']}"


async def innocent(args: argparse.Namespace, url: str, number: int, calm: dict[int, list[int]], counts: Counts) -> None:
    """Stream one answer after the other, and compare each with the calm run's."""
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            end_kind, tokens = await stream(client, url, body(number, args.tokens), counts)
            if end_kind == "done" and tokens != calm[number]:
                end_kind = "WRONG TOKENS"
                print(f"innocent {number}: {difference(tokens, calm[number])}")
            counts.innocent[end_kind] += 1


def difference(tokens: list[int], calm: list[int]) -> str:
    """Describe the first difference from the calm run."""
    at = next((i for i, (a, b) in enumerate(zip(tokens, calm, strict=False)) if a != b), min(len(tokens), len(calm)))
    return (
        f"{len(tokens)} tokens, {len(calm)} in the calm run, apart at {at}: {tokens[at : at + 6]}, {calm[at : at + 6]}"
    )


async def poisoner(args: argparse.Namespace, url: str, counts: Counts) -> None:
    """Send the poison repeatedly, ignoring refusals; with --vary another prompt each time."""
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        end, number = time.monotonic() + args.seconds, 0
        while time.monotonic() < end:
            number += 1
            prompt = [5, POISON, 9] + [6 + number % 50] * (number % 400 if args.vary else 0)
            request = body(0, args.at + 50) | {"prompt": prompt, "seed": None}
            end_kind, _ = await stream(client, url, request, counts)
            counts.poison[end_kind] += 1
            await asyncio.sleep(args.every)


async def killer(args: argparse.Namespace, process: subprocess.Popen[bytes], counts: Counts, url: str) -> None:
    """Send SIGKILL to the engine's process, some seconds after it became ready, while it streams."""
    end = time.monotonic() + args.seconds - 5
    while time.monotonic() < end:
        await asyncio.sleep(args.kill)
        if not await asyncio.to_thread(_ready, url):
            continue
        for child in psutil.Process(process.pid).children():
            os.kill(child.pid, signal.SIGKILL)
            counts.poison["kill -9"] += 1


def _ready(url: str) -> bool:
    return httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200


async def prober(args: argparse.Namespace, url: str, counts: Counts) -> None:
    """Check readiness twenty times a second."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            counts.probes += 1
            try:
                counts.unready += (await client.get(f"{url}/health/ready")).status_code != 200
            except httpx.HTTPError:
                counts.unready += 1
            await asyncio.sleep(0.05)


async def attack(args: argparse.Namespace, process: subprocess.Popen[bytes], url: str) -> None:
    counts, calm = Counts(), {}
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        for number in range(args.innocents):
            end_kind, calm[number] = await stream(client, url, body(number, args.tokens), Counts())
            assert end_kind == "done", end_kind
    crowd = [innocent(args, url, number, calm, counts) for number in range(args.innocents)]
    attacker = killer(args, process, counts, url) if args.kill else poisoner(args, url, counts)
    await asyncio.gather(*crowd, attacker, prober(args, url, counts))
    print(f"innocents: {dict(counts.innocent)}")
    done = counts.innocent["done"] / max(1, counts.innocent.total())
    print(f"innocents done: {100 * done:.1f} %")
    print(f"poisoner: {dict(counts.poison)}")
    print(f"not ready: {100 * counts.unready / max(1, counts.probes):.1f} % of {counts.probes} looks")
    print(f"longest pauses in streams, s: {[round(s, 2) for s in sorted(counts.pauses)[-5:]]}")
    if process.poll() is None:
        engine = (await asyncio.to_thread(httpx.get, f"{url}/v1/status", trust_env=False)).json()["engine"]
        wanted = ("restarts", "deaths", "deaths_explained", "replayed", "quarantined")
        print(f"engine: { {name: engine.get(name) for name in wanted} }")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--innocents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between poisons")
    parser.add_argument("--vary", action="store_true", help="another poisoned prompt each time")
    parser.add_argument("--at", type=int, default=0, help="the token at which the poison acts")
    parser.add_argument("--how", default="SIGABRT", help="a signal, hang, broken or raise")
    parser.add_argument("--beside", action="store_true", help="only beside another row")
    parser.add_argument("--kill", type=float, default=0, help="no poison, but SIGKILL every so many seconds")
    parser.add_argument("--hang-after", type=float, default=5)
    parser.add_argument("--port", type=int, default=8111)
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    parser.add_argument("--option", action="append", default=["--max-running=16"], help="of treadle serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "log"
        process, url = start(args, log)
        try:
            asyncio.run(attack(args, process, url))
            print(f"server: {'runs' if process.poll() is None else f'ended with {process.returncode}'}")
        finally:
            for child in psutil.Process(process.pid).children() if process.poll() is None else ():
                child.kill()
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
