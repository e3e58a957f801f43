"""Overload through the official SDK: N clients at its defaults, with one request each, all at once.

    python benchmarks/sdk_overload.py [--url http://127.0.0.1:8000/v1] [--clients 48 96] [--tokens 32] [--stream]

For each number of clients: the numbers of answered and failed ones, attempts per client, and for every refusal the wait
that `Retry-After` promised beside the true one: the time until the client's request was admitted. Start the server
afresh for the first figure: after some answers a server can estimate their times.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI


@dataclass
class Client:
    """One client's attempts: (time, status, promised seconds)."""

    attempts: list[tuple[float, int, float | None]] = field(default_factory=list)
    answered: bool = False
    error: str = ""
    took_s: float = 0.0

    def promised_and_true(self) -> list[tuple[float, float]]:
        """Return, for each promise, the promised seconds and those until the attempt that was admitted."""
        if not self.answered:
            return []
        admitted = self.attempts[-1][0]
        return [
            (promised, admitted - at)
            for at, status, promised in self.attempts
            if status == 503 and promised is not None
        ]


async def one(url: str, model: str, index: int, tokens: int, stream: bool) -> Client:
    client = Client()
    began = time.perf_counter()

    async def record(response: httpx.Response) -> None:
        promised = response.headers.get("retry-after-ms")
        client.attempts.append(
            (time.perf_counter(), response.status_code, float(promised) / 1000 if promised else None)
        )

    http: Any = httpx.AsyncClient(event_hooks={"response": [record]}, timeout=httpx.Timeout(600))
    async with AsyncOpenAI(base_url=url, api_key="none", http_client=http) as sdk:
        prompt = f"Write a few sentences about the number {index}, and why it matters."
        messages = [{"role": "user", "content": prompt}]
        try:
            answer: Any = await sdk.chat.completions.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=tokens,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
            if stream:
                async for _ in answer:
                    pass
            client.answered = True
        except APIError as error:
            client.error = f"{type(error).__name__}: {error.message[:90]}"
    client.took_s = time.perf_counter() - began
    return client


async def crowd(url: str, clients: int, tokens: int, stream: bool) -> None:
    async with httpx.AsyncClient() as http:
        model = (await http.get(f"{url}/models")).json()["data"][0]["id"]
    began = time.perf_counter()
    found = await asyncio.gather(*(one(url, model, i, tokens, stream) for i in range(clients)))
    wall_s = time.perf_counter() - began
    failed = [client for client in found if not client.answered]
    attempts = Counter(len(client.attempts) for client in found)
    pairs = [client.promised_and_true() for client in found]
    first = [pair[0] for pair in pairs if pair]
    every = [one for pair in pairs for one in pair]
    print(
        f"{clients} clients: {clients - len(failed)} answered, {len(failed)} failed in {wall_s:.1f} s; "
        f"requests per client {dict(sorted(attempts.items()))}"
    )
    for name, some in (("first promise", first), ("all promises", every)):
        if some:
            promised, true = zip(*some, strict=True)
            close = sum(abs(t - w) <= 0.5 * w for t, w in some) / len(some)
            print(
                f"  {name}: {len(some)} told p50 {statistics.median(promised):.1f} s (max {max(promised):.1f}), "
                f"true p50 {statistics.median(true):.1f} s (max {max(true):.1f}), {close:.0%} within 50 %"
            )
    for error, count in Counter(client.error for client in failed).items():
        print(f"  {count} x {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--clients", type=int, nargs="+", default=[48, 96])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    for clients in options.clients:
        asyncio.run(crowd(options.url, clients, options.tokens, options.stream))


if __name__ == "__main__":
    main()
