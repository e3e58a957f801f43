"""Overload with real clients, and the accuracy of `Retry-After`.

    python benchmarks/promises.py crowd    [--url http://127.0.0.1:8000/v1] [--clients 48 160 320] [--tokens 32] [--n 1]
    python benchmarks/promises.py defaults [--clients 48]      the official SDK at its defaults, as sdk_overload.py
    python benchmarks/promises.py load     [--rate 10] [--seconds 60]
    python benchmarks/promises.py flood    [--connections 100] [--seconds 30]

`crowd`: clients of the official SDK at once, each with one request, that obey `Retry-After` until they are answered.
`load`: requests at `--rate` times the server's capacity, in an open loop, that obey `Retry-After`: the used part of the
slots' time, and the times of refusals. `flood`: clients of one tenant that retry at once against `Retry-After`, beside
one request every `--pause` seconds of another. Tenants are addresses: the flood comes
from an address of this machine's network (`--flood-url`, as http://192.0.2.7:8000/v1, which the server has to listen on
too) and the others from loopback; with API keys give both (`--flood-key`, `--key`). On a busy machine measure
`python -m tests.support.paced`, whose steps take a set time and no CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI

MANY_RETRIES = 1000


@dataclass
class Client:
    """One request's attempts: (time, status, promised seconds, seconds until the answer's first byte)."""

    attempts: list[tuple[float, int, float | None, float]] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    answered: bool = False
    error: str = ""

    def pairs(self) -> list[tuple[float, float]]:
        """Return, for each promise, the promised seconds and those until the attempt that was admitted."""
        if not self.answered:
            return []
        admitted = self.attempts[-1][0]
        return [
            (promised, admitted - at)
            for at, status, promised, _ in self.attempts
            if status == 503 and promised is not None
        ]

    def record(self, sent: float, response: httpx.Response) -> None:
        promised = response.headers.get("retry-after-ms")
        now = time.perf_counter()
        self.attempts.append((sent, response.status_code, float(promised) / 1000 if promised else None, now - sent))


def _recording_client(client: Client) -> Any:
    async def sends(request: httpx.Request) -> None:
        request.extensions["sent"] = time.perf_counter()

    async def came(response: httpx.Response) -> None:
        client.record(response.request.extensions["sent"], response)

    hooks: dict[str, Any] = {"request": [sends], "response": [came]}
    return httpx.AsyncClient(event_hooks=hooks, timeout=httpx.Timeout(3600))


async def ask(options: argparse.Namespace, model: str, index: int, retries: int | None, *, n: int = 1) -> Client:
    """Send one request of the official SDK; `retries` None: its default."""
    client = Client(began=time.perf_counter())
    options_given: dict[str, Any] = {} if retries is None else {"max_retries": retries}
    async with AsyncOpenAI(
        base_url=options.url, api_key=options.key, http_client=_recording_client(client), timeout=3600, **options_given
    ) as sdk:
        try:
            answer = await sdk.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Write about the number {index:05d}."}],
                max_tokens=options.tokens,
                n=n,
                extra_body={"ignore_eos": True},
            )
            client.answered = len(answer.choices) == n
        except APIError as error:
            client.error = f"{type(error).__name__}: {error.message[:90]}"
    client.ended = time.perf_counter()
    return client


async def server_state(url: str, key: str) -> tuple[str, dict[str, Any]]:
    """Return the model's name and /v1/status."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http:
        model = (await http.get(f"{url}/models")).json()["data"][0]["id"]
        return model, (await http.get(f"{url}/status")).json()


# Modes ---------------------------------------------------------------------------------------------------------------


async def crowd(options: argparse.Namespace, clients: int, retries: int | None) -> None:
    """Send `clients` requests at once; every `--several`th asks for `--n` answers."""
    model, status = await server_state(options.url, options.key)
    began = time.perf_counter()
    found = await asyncio.gather(
        *(
            ask(options, model, i, retries, n=options.n if i % options.several == options.several - 1 else 1)
            for i in range(clients)
        )
    )
    wall_s = time.perf_counter() - began
    print(f"{clients} clients, {status['admission']['capacity']} slots: {_answers(found)} in {wall_s:.1f} s")
    _print_promises(found)


async def load(options: argparse.Namespace) -> None:
    """Run an open loop at `--rate` times the measured capacity."""
    model, status = await server_state(options.url, options.key)
    slots = status["admission"]["capacity"]
    warm = await asyncio.gather(*(ask(options, model, i, MANY_RETRIES) for i in range(4 * slots)))
    capacity = len(warm) / (max(c.ended for c in warm) - min(c.began for c in warm))
    print(f"capacity {capacity:.2f} answers a second with {slots} slots; {options.rate:g} times that follows")
    before = (await server_state(options.url, options.key))[1]["admission"]["ended"]
    rng, tasks, began = random.Random(0), [], time.perf_counter()
    at = began
    while (at := at + rng.expovariate(options.rate * capacity)) < began + options.seconds:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(_light(options, model, len(tasks))))
    status = (await server_state(options.url, options.key))[1]
    ended = sum(status["admission"]["ended"].values()) - sum(before.values())
    took_s = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = _LIGHT
    refusals = sorted(took for client in found for _, code, _, took in client.attempts if code == 503)
    codes = Counter(code for client in found for _, code, _, _ in client.attempts)
    print(f"{len(tasks)} requests in {took_s:.1f} s, statuses {dict(codes)}; {ended} answers")
    print(f"goodput {ended / took_s / capacity:.1%} of capacity")
    print(f"refusals p50 {_ms(refusals, 0.5)}, p99 {_ms(refusals, 0.99)}")
    _print_promises([client for client in found if client.answered])
    print(f"  admission: {status['admission']['refused']}, promises {status['admission']['promises']}")


_LIGHT: list[Client] = []


async def _light(options: argparse.Namespace, model: str, index: int) -> None:
    """Run a client without the SDK, which costs less: it obeys `retry-after-ms` and counts its attempts."""
    client = Client(began=time.perf_counter())
    _LIGHT.append(client)
    body = {"model": model, "prompt": f"number {index:05d}", "max_tokens": options.tokens, "ignore_eos": True}
    while not client.answered:
        sent = time.perf_counter()
        repeats = {"x-stainless-retry-count": str(len(client.attempts)), "authorization": f"Bearer {options.key}"}
        response = await _pool().post(f"{options.url}/completions", json=body, headers=repeats)
        client.record(sent, response)
        client.answered = response.status_code == 200
        if response.status_code != 503:
            return
        await asyncio.sleep(float(response.headers["retry-after-ms"]) / 1000)


_POOLS: list[httpx.AsyncClient] = []


def _pool() -> httpx.AsyncClient:
    if not _POOLS:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
        _POOLS.append(httpx.AsyncClient(timeout=httpx.Timeout(600), limits=limits))
    return _POOLS[0]


async def flood(options: argparse.Namespace) -> None:
    """Send one request every `--pause` seconds beside a flood."""
    model, _ = await server_state(options.url, options.key)
    alone = await ask(options, model, 0, 2)
    print(f"alone: {alone.ended - alone.began:.2f} s")
    flooding = [asyncio.create_task(_disobey(options, model, i)) for i in range(options.connections)]
    await asyncio.sleep(3)
    tasks = []
    for i in range(int(options.seconds)):
        tasks.append(asyncio.create_task(ask(options, model, i, None)))
        await asyncio.sleep(options.pause)
    found = await asyncio.gather(*tasks)
    for task in flooding:
        task.cancel()
    done = await asyncio.gather(*flooding, return_exceptions=True)
    took = sorted(client.ended - client.began for client in found)
    print(f"beside the flood: {_answers(found)}; took p50 {statistics.median(took):.2f} s, max {took[-1]:.2f} s")
    print(f"  {len(done)} connections of the flood got {sum(_FLOOD.values())} answers: {dict(_FLOOD)}")


_FLOOD: Counter[int] = Counter()


async def _disobey(options: argparse.Namespace, model: str, index: int) -> None:
    body = {"model": model, "prompt": f"flood {index:05d}", "max_tokens": options.tokens, "ignore_eos": True}
    head = {"authorization": f"Bearer {options.flood_key or options.key}"}
    async with httpx.AsyncClient(timeout=httpx.Timeout(600)) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                response = await http.post(f"{options.flood_url or options.url}/completions", json=body, headers=head)
                _FLOOD[response.status_code] += 1
            await asyncio.sleep(options.flood_pause)


# Output --------------------------------------------------------------------------------------------------------------


def _answers(found: Sequence[Client]) -> str:
    return f"{sum(client.answered for client in found)} of {len(found)} answered"


def _print_promises(found: Sequence[Client]) -> None:
    sent = sorted(len(client.attempts) for client in found)
    print(f"  requests per client: median {statistics.median(sent):g}, max {sent[-1]}; {dict(Counter(sent))}")
    first = [client.pairs()[0] for client in found if client.pairs()]
    every = [pair for client in found for pair in client.pairs()]
    for name, some in (("first promises", first), ("all promises", every)):
        if some:
            close = sum(abs(promised - true) <= 0.5 * true for promised, true in some) / len(some)
            promised, true = zip(*some, strict=True)
            print(
                f"  {name}: {len(some)}, {close:.0%} within 50 %; told p50 {statistics.median(promised):.1f} s "
                f"(max {max(promised):.1f}), true p50 {statistics.median(true):.1f} s (max {max(true):.1f})"
            )
    for error, count in Counter(client.error for client in found if client.error).items():
        print(f"  {count} x {error}")


def _ms(ascending: Sequence[float], part: float) -> str:
    if not ascending:
        return "none"
    return f"{1000 * ascending[min(len(ascending) - 1, math.ceil(part * len(ascending)) - 1)]:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["crowd", "defaults", "load", "flood"])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none")
    parser.add_argument("--clients", type=int, nargs="+", default=[48, 160, 320])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--n", type=int, default=1, help="answers that some requests ask for")
    parser.add_argument("--several", type=int, default=10, help="every how many requests ask for --n")
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between the requests beside a flood")
    parser.add_argument("--flood-url", default="")
    parser.add_argument("--flood-key", default="")
    parser.add_argument("--flood-pause", type=float, default=0.05, help="seconds between a connection's requests")
    options = parser.parse_args()
    match options.mode:
        case "load":
            asyncio.run(load(options))
        case "flood":
            asyncio.run(flood(options))
        case mode:
            for clients in options.clients:
                asyncio.run(crowd(options, clients, None if mode == "defaults" else MANY_RETRIES))


if __name__ == "__main__":
    main()
