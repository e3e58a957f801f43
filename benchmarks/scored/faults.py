"""R3: the engine dies, or hangs, in the middle of eight streams."""

from __future__ import annotations

import asyncio
import signal
import time
from itertools import pairwise
from pathlib import Path

from ..client import Reply
from .figures import Figure, ms
from .load import prompt_of
from .server import Server, treadle

STREAMS = 8
LONG = 800
BEGUN_S = 30.0
OPTIONS = ("--max-running", str(STREAMS), "--hang-after", "5")
BOUNDS_S = {signal.SIGKILL: 1.0, signal.SIGSEGV: 1.0, signal.SIGSTOP: 30.0}
BACK_S = 10.0


async def faults(model: Path, log: Path) -> list[Figure]:
    """Send each signal to other prompts than the last, so that no request is suspected for an earlier death."""
    server = treadle(model, log, OPTIONS)
    await server.start()
    try:
        figures = []
        for number, (fault, bound_s) in enumerate(BOUNDS_S.items()):
            prompts = [prompt_of(STREAMS * number + index) for index in range(STREAMS)]
            figures += await struck(server, fault, bound_s, prompts)
            await settled(server)
        return figures
    finally:
        await server.stop()


async def struck(server: Server, fault: signal.Signals, bound_s: float, prompts: list[str]) -> list[Figure]:
    calm = await asyncio.gather(*(server.generate(prompt, LONG) for prompt in prompts))
    load_s = (await server.status())["engine"]["load_s"]
    streams = [asyncio.create_task(server.generate(prompt, LONG, within_s=180.0)) for prompt in prompts]
    await all_run(server)
    server.engine().send_signal(fault)
    began = time.perf_counter()
    gone_s = await until_ready(server, ready=False, within_s=bound_s + 10) - began
    back_s = await until_ready(server, ready=True, within_s=60.0) - began
    replies = await asyncio.gather(*streams)
    return [
        Figure(f"{fault.name}: ready says 503 after", ms(gone_s), gone_s <= bound_s),
        Figure(f"{fault.name}: ready again after that", f"{back_s - gone_s:.1f} s", back_s - gone_s <= BACK_S + load_s),
        *ends(fault.name, replies, calm),
    ]


def ends(name: str, replies: list[Reply], calm: list[Reply]) -> list[Figure]:
    informed = sum(bool(reply.finished or reply.error or reply.status >= 400) for reply in replies)
    same = sum(reply.finished and reply.text == other.text for reply, other in zip(replies, calm, strict=True))
    pause = max(longest_pause(reply) for reply in replies)
    return [
        Figure(f"{name}: streams that heard their end", f"{informed} of {STREAMS}", informed == STREAMS),
        Figure(
            f"{name}: streams that came to it, with the tokens of a calm run", f"{same} of {STREAMS}", same == STREAMS
        ),
        Figure(f"{name}: longest pause in a stream", f"{pause:.1f} s"),
    ]


def longest_pause(reply: Reply) -> float:
    times = [0.0, *reply.token_s]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


async def all_run(server: Server) -> None:
    """Wait until all streams are in the engine, and have some of their tokens."""
    until = time.perf_counter() + BEGUN_S
    while time.perf_counter() < until:
        await asyncio.sleep(0.2)
        if (await server.status())["admission"]["running"] == STREAMS:
            return


async def until_ready(server: Server, *, ready: bool, within_s: float) -> float:
    """Return the time when `/health/ready` first answered so."""
    until = time.perf_counter() + within_s
    while time.perf_counter() < until:
        if ((await server.get("/health/ready")).status == 200) == ready:
            return time.perf_counter()
        await asyncio.sleep(0.005)
    return float("inf")


async def settled(server: Server) -> None:
    """Wait until the server answers and no earlier request is left."""
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        await asyncio.sleep(0.1)
        answers = (await server.generate("Hello", 1)).status == 200
        if answers and not (await server.status())["admission"]["rows"]:
            return
