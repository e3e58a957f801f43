"""Rows that any OpenAI-compatible server can be measured by."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from client import Reply

from .figures import Figure, mb, ms, quantile
from .server import Server

PROBE = Path(__file__).with_name("probe.py")
WORDS = "The ship left the harbour three hours late, and nobody aboard could say why. "


def prompt_of(index: int, characters: int = 60) -> str:
    """A prompt that shares no beginning with another index's."""
    return f"{index} {WORDS * (characters // len(WORDS) + 1)}"[:characters]


# R1: clients that leave ---------------------------------------------------------------------------------------------


async def leavers(server: Server, count: int = 1000, at_once: int = 24) -> list[Figure]:
    """`count` streams, each left at a random moment, beside streams that nobody leaves."""
    chance, free, seen = random.Random(1), asyncio.Semaphore(at_once), Counter[str]()
    calm = (await server.generate(prompt_of(0), 48)).text
    idle = statistics.median([(await server.generate(prompt_of(1), 2)).total_s for _ in range(5)])
    before = server.held()

    async def leave(index: int) -> None:
        async with free:
            after: float | int = chance.randint(1, 30) if chance.random() < 0.5 else chance.random() * 0.3
            body = {"prompt": prompt_of(index, chance.choice((10, 400, 2000))), "max_tokens": 400, "stream": True}
            reply = await server.post("/v1/completions", body, leave_after=after)
            seen[reply.error or str(reply.status)] += 1

    async def stay() -> list[Reply]:
        return [await server.generate(prompt_of(0), 48, within_s=120.0) for _ in range(16)]

    staying = asyncio.create_task(stay())
    await asyncio.gather(*(leave(index) for index in range(2, count + 2)))
    follow = await server.generate(prompt_of(1), 2)
    free_s = await emptied(server)
    untouched = [reply for reply in await staying if reply.status == 200]
    same = sum(reply.text == calm for reply in untouched)
    after = await quiet(server)
    return [
        Figure("answers of those who left", ", ".join(f"{n} {what}" for what, n in sorted(seen.items()))),
        Figure("slots free after the last one left", free_s, None if not server.own else free_s.endswith("0 left")),
        Figure("a follow-up beside an idle one", f"{ms(follow.total_s)} beside {ms(idle)}"),
        Figure("admitted untouched streams that are identical", f"{same} of {len(untouched)}", same == len(untouched)),
        Figure(
            "descriptors, threads, memory, before and after",
            f"{before.descriptors} and {after.descriptors}, {before.threads} and {after.threads}, "
            f"{mb(before.rss)} and {mb(after.rss)}",
            after.descriptors <= before.descriptors,
        ),
    ]


async def emptied(server: Server, within_s: float = 60.0) -> str:
    """How long it takes until Treadle holds nothing any more; peers do not tell."""
    if not server.own:
        return "not told"
    began, rows = time.perf_counter(), -1
    while rows and time.perf_counter() < began + within_s:
        rows = (await server.get("/v1/status")).json()["admission"]["rows"]
        await asyncio.sleep(0.005 if rows else 0)
    return f"{ms(time.perf_counter() - began)}, {rows} left"


async def quiet(server: Server, within_s: float = 10.0) -> object:
    """What the server holds once that has stopped falling."""
    held = server.held()
    until = time.perf_counter() + within_s
    while time.perf_counter() < until:
        await asyncio.sleep(1.0)
        now = server.held()
        if now.descriptors >= held.descriptors:
            return now
        held = now
    return held


# R2: overload -------------------------------------------------------------------------------------------------------


async def overload(server: Server, seconds: float = 60.0, clients: int = 120, slots: int = 4) -> list[Figure]:
    """Ten times the clients that fit, each of which waits as long as it is told."""
    calm = await goodput(server, slots, min(10.0, seconds))
    before = server.held().rss
    seen, refused, promised = Counter[str](), list[float](), list[tuple[float, float]]()
    until = time.perf_counter() + seconds

    async def client(index: int) -> None:
        told: tuple[float, float] | None = None  # when, and how long
        while time.perf_counter() < until:
            reply = await server.generate(prompt_of(index), 64, within_s=120.0)
            seen[reply.error or str(reply.status)] += 1
            now = time.perf_counter()
            if reply.status in (429, 503):
                refused.append(reply.header_s)
                wait_s = float(reply.headers.get("retry-after-ms", 0)) / 1e3 or float(
                    reply.headers.get("retry-after", 1)
                )
                told = told or (now, wait_s)
                await asyncio.sleep(min(wait_s, max(0.0, until - now)))
            elif reply.status == 200 and told is not None:
                promised.append((told[1], now - reply.total_s - told[0]))
                told = None

    began = time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(clients)))
    took = time.perf_counter() - began
    served = seen["200"] / took
    alien = sum(n for what, n in seen.items() if what not in ("200", "429", "503"))
    close = sum(abs(told - true) <= 0.5 * max(true, 0.1) for told, true in promised)
    after = server.held().rss
    return [
        Figure("answers", ", ".join(f"{n} {what}" for what, n in sorted(seen.items())), alien == 0),
        Figure(
            "refusal p50, p99",
            f"{ms(quantile(refused, 0.5))}, {ms(quantile(refused, 0.99))}" if refused else "none refused",
            quantile(refused, 0.99) <= 0.05 if refused else None,
        ),
        Figure(
            "first promise within 50 %",
            f"{close} of {len(promised)}" if promised else "none made",
            close >= 0.9 * len(promised) if promised else None,
        ),
        Figure(
            "served, of what is served calmly", f"{served / calm:.0%} ({served:.1f} a second)", served >= 0.95 * calm
        ),
        Figure("memory, before and after", f"{mb(before)} and {mb(after)}", after <= 1.05 * before),
    ]


def told_s(reply: Reply) -> float:
    """Seconds that a refusal asks to wait; 1 where it does not say."""
    exact = reply.headers.get("retry-after-ms")
    return float(exact) / 1e3 if exact else float(reply.headers.get("retry-after", 1))


async def goodput(server: Server, clients: int, seconds: float) -> float:
    """Answers a second with as many clients as slots."""
    done, until = 0, time.perf_counter() + seconds

    async def client(index: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            done += (await server.generate(prompt_of(index), 64)).status == 200

    began = time.perf_counter()
    await asyncio.gather(*(client(index) for index in range(clients)))
    return done / (time.perf_counter() - began)


# R6: the end --------------------------------------------------------------------------------------------------------


async def drain(server: Server, tokens: int = 1500) -> list[Figure]:
    """SIGTERM in the middle of four streams. The server has ended afterwards."""
    assert server.process is not None
    streams = [asyncio.create_task(server.generate(prompt_of(index), tokens, within_s=120.0)) for index in range(4)]
    await asyncio.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    began = time.perf_counter()
    await asyncio.sleep(0.05)
    fresh = await server.generate(prompt_of(9), 2, within_s=10.0)
    replies = await asyncio.gather(*streams)
    whole = sum(reply.finished and not reply.error for reply in replies)
    try:
        code = str(await asyncio.to_thread(server.process.wait, 60))
    except Exception:
        code = "did not end"
    return [
        Figure("running streams that came to their end", f"{whole} of 4", whole == 4),
        Figure("a new request meanwhile", str(fresh.status or fresh.error), fresh.status == 503),
        Figure("exit code, after", f"{code}, {time.perf_counter() - began:.1f} s", code == "0"),
    ]


# R7: the event loop -------------------------------------------------------------------------------------------------


async def while_probed(server: Server, seconds: float, load: Callable[[], Awaitable[object]]) -> list[float | None]:
    """Answer times of the server's cheapest route, from another process, while `load` runs again and again."""
    prober = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROBE),
        "127.0.0.1",
        str(server.port),
        server.probe,
        str(seconds),
        stdout=asyncio.subprocess.PIPE,
    )

    async def press() -> None:
        while True:
            await load()

    pressing = [asyncio.create_task(press()) for _ in range(4)]
    out, _ = await prober.communicate()
    for task in pressing:
        task.cancel()
    await asyncio.gather(*pressing, return_exceptions=True)
    took: list[float | None] = json.loads(out)
    return took


def lag(what: str, took: list[float | None]) -> Figure:
    answered = [seconds for seconds in took if seconds is not None]
    silent = len(took) - len(answered)
    worst = quantile(answered, 0.99)
    value = f"p50 {ms(quantile(answered, 0.5))}, p99 {ms(worst)}, max {ms(max(answered, default=float('nan')))}"
    return Figure(what, value + (f", {silent} without an answer" if silent else ""), not silent and worst <= 0.02)


HOSTILE: dict[str, bytes] = {
    "ids of 8 MB": b'{"max_tokens":1,"prompt":[' + b"1," * 4_000_000 + b"1]}",
    "small lists of 8 MB": b'{"max_tokens":1,"prompt":[' + b"[1]," * 2_000_000 + b"[1]]}",
    "small objects of 8 MB": b'{"max_tokens":1,"prompt":[' + b'{"a":1},' * 1_000_000 + b"1]}",
    "nested 100,000 deep": b'{"max_tokens":1,"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "escapes of 6 MB": b'{"max_tokens":1,"prompt":"' + b"\\u00e9" * 1_000_000 + b'"}',
}


async def event_loop(server: Server, seconds: float = 10.0) -> list[Figure]:
    """Honest long prompts, then each hostile body, from four clients each."""
    numbers = iter(range(10**9))
    figures = [
        lag(
            "four clients with long prompts",
            await while_probed(server, seconds, lambda: server.generate(prompt_of(next(numbers), 6000), 16)),
        )
    ]
    for what, body in HOSTILE.items():

        async def send(body: bytes = body) -> None:
            await raw(server, body)

        figures.append(lag(f"four clients with {what}", await while_probed(server, seconds, send)))
    return figures


async def raw(server: Server, body: bytes, within_s: float = 30.0) -> int:
    """Send `body` as it is; the status, 0 where none came."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                line = await reader.readline()
                await reader.read()
                return int(line.split()[1]) if line else 0
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, ValueError, IndexError):
        await asyncio.sleep(0.05)
        return 0


# S2: web pages ------------------------------------------------------------------------------------------------------

PAGES = {
    "a page of another site": ("127.0.0.1", "https://evil.example"),
    "a page without an origin": ("127.0.0.1", "null"),
    "a name that was rebound": ("evil.example", "http://evil.example"),
    "a name without dots": ("evilhost", "http://evilhost"),
}


async def browser(server: Server) -> list[Figure]:
    """What pages of other sites get from a server with its default options."""
    figures = []
    for what, (host, origin) in PAGES.items():
        status, cors = await as_page(server, host, origin)
        through = status == 200 or cors
        value = f"{status}" + (", and may read the answer" if cors else "")
        figures.append(Figure(f"{what} asks for a completion", value, not through))
    return figures


async def as_page(server: Server, host: str, origin: str) -> tuple[int, bool]:
    """The status of a simple request of a page, which browsers send without asking, and whether it may read it."""
    body = b'{"prompt":"hi","max_tokens":1}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nContent-Type: text/plain\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    top = answer.partition(b"\r\n\r\n")[0].lower()
    return int(answer.split()[1]), b"access-control-allow-origin" in top
