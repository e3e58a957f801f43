"""What a running server does under the loads that the contract names.

    python benchmarks/serve.py SCENARIO... [--url http://127.0.0.1:8000]

speed       tokens per second with 1 and 8 clients
burst       staggered bursts, 16 at c = 4 and 64 at c = 16, 100 ms apart: TTFT max / median (P1)
cancel      a stream is left in the middle: the follow-up's TTFT over an idle one's
disconnect  1,000 clients leave at random phases: leaked slots (R1)
overload    ten times the load that fits, 60 s: answers, refusal p99, Retry-After against what was true (R2)
tokenize    event-loop lag while a 100,000-token prompt is tokenized (R7)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from client import Reply, Target

TEXT = "The ship left the harbour three hours late, and nobody aboard could say why. "


def ask(words: int = 12, tokens: int = 64, **more: Any) -> dict[str, Any]:
    prompt = " ".join((TEXT * (words // 14 + 1)).split()[:words])
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))] if ordered else float("nan")


async def generate(target: Target, body: dict[str, Any], **how: Any) -> Reply:
    return await target.post("/v1/completions", body, **how)


async def status(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = (await target.get("/v1/status")).json()
    return found


async def idle(target: Target, within_s: float = 120.0) -> float:
    """Seconds until nothing is admitted any more."""
    began = time.perf_counter()
    while (await status(target))["admission"]["rows"]:
        if time.perf_counter() - began > within_s:
            raise SystemExit(f"slots still taken after {within_s:g} s")
        await asyncio.sleep(0.02)
    return time.perf_counter() - began


async def speed(target: Target) -> None:
    for clients in (1, 8):
        began = time.perf_counter()
        replies = await asyncio.gather(*(generate(target, ask(12 + i, 64)) for i in range(clients)))
        wall = time.perf_counter() - began
        tokens = sum(len(r.token_s) for r in replies)
        first, last = min(r.ttft_s for r in replies), max(r.token_s[-1] for r in replies)
        print(f"speed c={clients}: {tokens / wall:.1f} tok/s in all, {tokens / (last - first):.1f} tok/s decoding")


async def burst(target: Target) -> None:
    for total, at_once in ((16, 4), (64, 16)):
        free = asyncio.Semaphore(at_once)

        async def one(i: int, free: asyncio.Semaphore = free) -> Reply:
            await asyncio.sleep(0.1 * i)
            async with free:
                return await generate(target, ask(10 + i % 5, 64))

        replies = await asyncio.gather(*(one(i) for i in range(total)))
        ttft = [r.ttft_s for r in replies if r.token_s]
        middle, most = statistics.median(ttft), max(ttft)
        gaps = [b - a for r in replies for a, b in zip(r.token_s, r.token_s[1:], strict=False)]
        print(
            f"burst {total} at c={at_once}: {len(ttft)} complete, TTFT median {middle * 1e3:.0f} max {most * 1e3:.0f} ms, "
            f"max/median {most / middle:.2f}; gap p50 {quantile(gaps, 0.5) * 1e3:.0f} p99 {quantile(gaps, 0.99) * 1e3:.0f} ms"
        )


async def cancel(target: Target) -> None:
    unloaded = statistics.median([(await generate(target, ask(12, 2))).ttft_s for _ in range(7)])
    follow = []
    for _ in range(7):
        await generate(target, ask(12, 400), leave_after=5)
        follow.append((await generate(target, ask(12, 2))).ttft_s)
    after = statistics.median(follow)
    print(f"cancel: follow-up TTFT {after * 1e3:.0f} ms, idle {unloaded * 1e3:.0f} ms, ratio {after / unloaded:.2f}")


async def disconnect(target: Target, total: int = 1000, at_once: int = 24) -> None:
    rng, free, seen = random.Random(1), asyncio.Semaphore(at_once), Counter[str]()
    before = await status(target)

    async def one() -> None:
        async with free:
            phase = rng.random()
            leave: float | int = rng.randint(1, 6) if phase < 0.3 else rng.random() * (0.05 if phase < 0.5 else 1.0)
            stream = rng.random() < 0.7
            body = ask(rng.choice((5, 60, 400)), rng.choice((1, 4, 64)), stream=stream)
            reply = await generate(target, body, leave_after=leave if stream else float(leave) / 4)
            seen[reply.error or str(reply.status)] += 1

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(total)))
    settled = await idle(target)
    after = await status(target)
    print(
        f"disconnect: {total} in {time.perf_counter() - began:.0f} s, {dict(seen)}; all slots free {settled:.2f} s after the "
        f"last; rows {after['admission']['rows']}, tokens reserved {after['admission']['tokens_reserved']}, restarts "
        f"{after['engine']['restarts'] - before['engine']['restarts']}; then {(await generate(target, ask(8, 2))).status}"
    )


async def overload(target: Target, seconds: float = 60.0) -> None:
    limits = (await status(target))["admission"]
    fits = limits["capacity"] + limits["max_waiting"]
    seen, refused, truth = Counter[str](), list[float](), list[float]()
    lag, until = list[float](), time.perf_counter() + seconds

    async def client(i: int) -> None:
        rng = random.Random(i)
        await asyncio.sleep(rng.random())
        while time.perf_counter() < until:
            reply = await generate(target, ask(10, 16))
            seen[reply.error or str(reply.status)] += 1
            if reply.status != 503:
                continue
            refused.append(reply.header_s)
            wait = int(reply.headers["retry-after-ms"]) / 1e3
            told = time.perf_counter()
            await asyncio.sleep(min(wait, max(0.0, until - time.perf_counter())))
            if told + wait < until:
                again = await generate(target, ask(10, 16))
                seen[f"after waiting {again.error or again.status}"] += 1
                truth.append(float(again.status == 200))

    async def health() -> None:
        while time.perf_counter() < until:
            lag.append((await target.get("/health/ready")).total_s)
            await asyncio.sleep(0.1)

    await asyncio.gather(health(), *(client(i) for i in range(10 * fits)))
    rate = statistics.mean(truth) if truth else float("nan")
    print(
        f"overload {10 * fits} clients for {seconds:g} s: {dict(seen)}; refusal p50 {quantile(refused, 0.5) * 1e3:.0f} p99 "
        f"{quantile(refused, 0.99) * 1e3:.0f} ms; {rate:.0%} of those who waited Retry-After got in; ready answered p50 "
        f"{quantile(lag, 0.5) * 1e3:.0f} p99 {quantile(lag, 0.99) * 1e3:.0f} ms"
    )
    print("  event-loop lag of the server:", (await status(target))["event_loop_lag"])


async def tokenize(target: Target) -> None:
    prompt = TEXT * 6500
    times = list[float]()
    sent = asyncio.create_task(generate(target, {"prompt": prompt, "max_tokens": 1}))
    while not sent.done():
        times.append((await target.get("/health/live")).total_s)
        await asyncio.sleep(0.005)
    reply = sent.result()
    print(
        f"tokenize: {len(prompt)} characters answered {reply.status} in {reply.total_s:.2f} s "
        f"({reply.json()['error']['message'][:60] if reply.status >= 400 else ''}); live p50 "
        f"{quantile(times, 0.5) * 1e3:.1f} p99 {quantile(times, 0.99) * 1e3:.1f} max {max(times) * 1e3:.1f} ms"
    )


SCENARIOS: dict[str, Callable[[Target], Coroutine[Any, Any, None]]] = {
    "speed": speed,
    "burst": burst,
    "cancel": cancel,
    "disconnect": disconnect,
    "overload": overload,
    "tokenize": tokenize,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    parts = urlsplit(options.url)
    target = Target(parts.hostname or "127.0.0.1", parts.port or 80)
    for name in options.scenarios:
        asyncio.run(SCENARIOS[name](target))


if __name__ == "__main__":
    main()
