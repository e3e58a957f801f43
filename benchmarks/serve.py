"""Figures of a running server under the loads that the contract names.

    python benchmarks/serve.py SCENARIO... [--url http://127.0.0.1:8000]

speed       tokens per second with 1 and 8 clients
burst       staggered bursts, 16 at c = 4 and 64 at c = 16, 100 ms apart: TTFT max / median (P1)
cancel      a stream is left in the middle: the follow-up's TTFT over an idle one's
stall       a long prompt joins four decoders: gaps, rate, a short request's TTFT (P3, P4)
disconnect  1,000 clients leave at random phases: leaked slots (R1)
overload    ten times the load that fits, 60 s: answers, refusal p99, Retry-After against what was true (R2)
tokenize    event-loop lag while a 100,000-token prompt is tokenized (R7)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.client import Reply, Target

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


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


async def generate(target: Target, body: dict[str, Any], **arguments: Any) -> Reply:
    return await target.post("/v1/completions", body, **arguments)


async def status(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = (await target.get("/v1/status")).json()
    return found


async def idle(target: Target, within_s: float = 120.0) -> float:
    """Return the seconds until no request is admitted any more."""
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
        middle, largest = statistics.median(ttft), max(ttft)
        gaps = [gap for r in replies for gap in gaps_of(r)]
        print(
            f"burst {total} at c={at_once}: {len(ttft)} complete, TTFT median {ms(middle)} max {ms(largest)}, "
            f"max/median {largest / middle:.2f}; gap p50 {ms(quantile(gaps, 0.5))} p99 {ms(quantile(gaps, 0.99))}"
        )


async def cancel(target: Target) -> None:
    for words in (12, 60):
        await cancel_at(target, words)


async def cancel_at(target: Target, words: int) -> None:
    unloaded = statistics.median([(await generate(target, ask(words, 2))).ttft_s for _ in range(7)])
    follow = []
    for _ in range(7):
        await generate(target, ask(12, 400), leave_after=5)
        follow.append((await generate(target, ask(words, 2))).ttft_s)
    after = statistics.median(follow)
    print(f"cancel: {words} words, follow-up TTFT {ms(after)}, idle {ms(unloaded)}, ratio {after / unloaded:.2f}")


async def stall(target: Target, words: int = 1800) -> None:
    """Run four decoders; then a long prompt joins, and a short request comes while it prefills."""

    async def run(with_long: bool) -> tuple[list[float], float, float]:
        decoders = [asyncio.create_task(generate(target, ask(10 + i, 160))) for i in range(4)]
        await asyncio.sleep(3.0)
        began, short_s = time.perf_counter(), float("nan")
        if with_long:
            long = asyncio.create_task(generate(target, ask(words, 1)))
            await asyncio.sleep(1.0)
            short_s = (await generate(target, ask(12, 1))).ttft_s
            await long
        else:
            short_s = (await generate(target, ask(12, 1))).ttft_s
            await asyncio.sleep(6.0)
        wall = time.perf_counter() - began
        for task in decoders:
            await task
        window = [
            gap
            for task in decoders
            for gap, at in zip(gaps_of(task.result()), task.result().token_s[1:], strict=True)
            if 3.0 < at < 3.0 + wall
        ]
        return window, wall, short_s

    idle_gaps, _, idle_short = await run(False)
    gaps, wall, short_s = await run(True)
    rate = statistics.mean(idle_gaps) / statistics.mean(gaps)
    print(
        f"stall: {words} words prefilled in {wall:.1f} s beside 4 decoders: gap p99 {ms(quantile(gaps, 0.99))}, "
        f"idle {ms(quantile(idle_gaps, 0.99))}, ratio {quantile(gaps, 0.99) / quantile(idle_gaps, 0.99):.2f}; "
        f"decoders keep {rate:.0%}; short request's TTFT {short_s * 1e3:.0f} ms, without the long one "
        f"{idle_short * 1e3:.0f}, ratio {short_s / idle_short:.2f}"
    )


def gaps_of(reply: Reply) -> list[float]:
    return [b - a for a, b in zip(reply.token_s, reply.token_s[1:], strict=False)]


async def disconnect(target: Target, total: int = 1000, at_once: int = 24) -> None:
    rng, free, seen = random.Random(1), asyncio.Semaphore(at_once), Counter[str]()
    before = await status(target)

    async def one() -> None:
        async with free:
            phase = rng.random()
            leave: float | int = rng.randint(1, 6) if phase < 0.3 else rng.random() * (0.05 if phase < 0.5 else 1.0)
            stream = rng.random() < 0.7
            body = ask(rng.choice((5, 60, 400)), rng.choice((1, 4, 64)), stream=stream)
            while True:
                reply = await generate(target, body, leave_after=leave if stream else float(leave) / 4)
                seen[reply.error or str(reply.status)] += 1
                if reply.status != 503:
                    return
                await asyncio.sleep(0.1)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(total)))
    settled = await idle(target)
    after = await status(target)
    print(
        f"disconnect: {total} in {time.perf_counter() - began:.0f} s, {dict(seen)}; all slots free {settled:.2f} s "
        f"after the last; rows {after['admission']['rows']}, tokens {after['admission']['tokens_reserved']}, "
        f"restarts {after['engine']['restarts'] - before['engine']['restarts']}; "
        f"then {(await generate(target, ask(8, 2))).status}"
    )


async def overload(target: Target, seconds: float = 60.0) -> None:
    limits = (await status(target))["admission"]
    fits = limits["capacity"] + limits["max_waiting"]
    seen, refused, waited, truth = Counter[str](), list[float](), list[float](), list[float]()
    ready, own_lag, until = list[float](), list[float](), time.perf_counter() + seconds

    async def client(i: int) -> None:
        rng = random.Random(i)
        await asyncio.sleep(rng.random())
        while time.perf_counter() < until:
            reply = await generate(target, ask(10, 16))
            seen[reply.error or str(reply.status)] += 1
            if reply.status != 503:
                continue
            (waited if reply.header_s > 0.9 * limits["max_wait_s"] else refused).append(reply.header_s)
            wait = int(reply.headers["retry-after-ms"]) / 1e3
            refused_at = time.perf_counter()
            await asyncio.sleep(min(wait, max(0.0, until - time.perf_counter())))
            if refused_at + wait < until:
                again = await generate(target, ask(10, 16))
                seen[f"after waiting {again.error or again.status}"] += 1
                truth.append(float(again.status == 200))

    async def health() -> None:
        while time.perf_counter() < until:
            ready.append((await target.get("/health/ready")).total_s)
            await asyncio.sleep(0.1)

    async def watch_own_lag() -> None:
        while (due := time.perf_counter() + 0.005) < until:
            await asyncio.sleep(0.005)
            own_lag.append(time.perf_counter() - due)

    await asyncio.gather(health(), watch_own_lag(), *(client(i) for i in range(10 * fits)))
    rate = statistics.mean(truth) if truth else float("nan")
    print(
        f"overload {10 * fits} clients for {seconds:g} s: {dict(seen)}; refusal p50 {ms(quantile(refused, 0.5))} "
        f"p99 {ms(quantile(refused, 0.99))}, {len(waited)} after their wait; {rate:.0%} of those who waited "
        f"Retry-After got in; ready answered "
        f"p50 {ms(quantile(ready, 0.5))} p99 {ms(quantile(ready, 0.99))}; this client's own lag p99 "
        f"{ms(quantile(own_lag, 0.99))} max {ms(max(own_lag))}"
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
    "stall": stall,
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
