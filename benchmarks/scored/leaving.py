"""R1: clients that leave in the middle of their answers."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import grpc

from ..abort_storm import Storm
from ..client import Reply
from .figures import Figure, counted, mb, ms, quantile
from .load import prompt_of
from .server import Resources, Server, treadle

REST_S = 15.0  # pools of memory go back to the system some seconds after the last request
STAYERS = 16
SLACK_FDS, SLACK_THREADS = 2, 1
ENDS = {"abort", "call cancelled", "CANCELLED", "RESOURCE_EXHAUSTED", "length"}


async def leavers(server: Server, count: int = 1000, at_once: int = 16, within_s: float = 240.0) -> list[Figure]:
    """Run `count` streams, or fewer if `within_s` passes, each left at a random moment, beside streams that are read to
    their end."""
    rng, outcomes, todo = random.Random(1), Counter[str](), iter(range(2, 4 * count))
    until = time.perf_counter() + within_s
    calm = (await server.generate(prompt_of(0), 48)).text
    idle = statistics.median([(await server.generate(prompt_of(1), 2)).total_s for _ in range(5)])
    before = server.resources()

    async def leave() -> None:
        """Leave streams; a refused one did not leave, so another comes in its place."""
        for index in todo:
            after: float | int = rng.randint(1, 30) if rng.random() < 0.5 else rng.random() * 0.3
            prompt = prompt_of(index, rng.choice((10, 400, 2000)))
            reply = await server.generate(prompt, 400, leave_after=after)
            outcomes[reply.error or str(reply.status)] += 1
            if outcomes["left"] >= count - at_once + 1 or time.perf_counter() > until:
                return

    async def stay() -> list[Reply]:
        return [await server.generate(prompt_of(0), 48, within_s=120.0) for _ in range(STAYERS)]

    staying = asyncio.create_task(stay())
    await asyncio.gather(*(leave() for _ in range(at_once)))
    began = time.perf_counter()
    follow = await server.generate(prompt_of(1), 2, within_s=120.0)
    left = await emptied(server, began)
    stayed = await staying
    same = sum(reply.text == calm for reply in stayed)
    refused = sum(reply.status in (429, 503) for reply in stayed)
    value = f"{same} of {STAYERS}" + (f", {refused} refused" if refused else "")
    await asyncio.sleep(REST_S)
    return [
        Figure("answers of those who left", counted(outcomes)),
        *left,
        Figure("the next request, beside one to an idle server", f"{ms(follow.total_s)}, {ms(idle)}"),
        Figure("untouched streams with the tokens of a calm run", value, same + refused == STAYERS),
        *leaked(before, server.resources()),
    ]


async def emptied(server: Server, began: float, within_s: float = 60.0) -> list[Figure]:
    """Return the time after `began` at which Treadle holds nothing any more; peers do not report it."""
    if not server.own:
        return []
    rows = -1
    while rows and time.perf_counter() < began + within_s:
        admission = (await server.status())["admission"]
        rows = admission["rows"] + admission["tokens_reserved"]
        await asyncio.sleep(0.005 if rows else 0)
    took = ms(time.perf_counter() - began)
    return [Figure("slots and tokens held afterwards", f"{rows} after {took}", rows == 0)]


def leaked(before: Resources, after: Resources) -> list[Figure]:
    descriptors = after.descriptors <= before.descriptors + SLACK_FDS
    threads = after.threads <= before.threads + SLACK_THREADS
    return [
        Figure("descriptors, before and after", f"{before.descriptors}, {after.descriptors}", descriptors),
        Figure("threads, before and after", f"{before.threads}, {after.threads}", threads),
        Figure(f"memory of all processes, before and {REST_S:g} s after", f"{mb(before.rss)}, {mb(after.rss)}"),
    ]


# Treadle alone ------------------------------------------------------------------------------------------------------


async def work_for_nobody(model: Path, log: Path) -> list[Figure]:
    """Count tokens computed for clients that have left; and abort gRPC calls before, at and after their start."""
    server = treadle(model, log, ("--grpc-port", "0"))
    await server.start()
    try:
        return [*await wasted(server), *await storm(server)]
    finally:
        await server.stop()


async def wasted(server: Server, count: int = 100) -> list[Figure]:
    """Count tokens computed beyond the last one that a leaver had read, one leaver after the other."""
    rng, beyond = random.Random(2), []
    for index in range(count):
        before = await computed(server)
        reply = await server.generate(prompt_of(index), 2000, leave_after=rng.randint(1, 30))
        await emptied(server, time.perf_counter())
        beyond.append(await settled(server) - before - len(reply.token_s))
    value = f"p50 {quantile(beyond, 0.5):.0f}, p99 {quantile(beyond, 0.99):.0f}, max {max(beyond):.0f}"
    return [Figure(f"tokens computed past the last one read, of {count} who left in turn", value)]


async def computed(server: Server) -> int:
    """Return the engine's count of completion tokens."""
    statistics_ = (await server.status())["engine"]["statistics"] or {}
    return int(statistics_.get("completion_tokens", 0))


async def settled(server: Server) -> int:
    """Return the same once it stands still."""
    found = -1
    while (now := await computed(server)) != found:
        found = now
        await asyncio.sleep(0.02)
    return found


async def storm(server: Server, count: int = 400) -> list[Figure]:
    """Run `benchmarks/abort_storm.py` over both gRPC wires."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        found = Storm(channel, 0)
        await asyncio.gather(*(found.one(index) for index in range(count)))
    odd = {end for end in found.ends if end.partition(": ")[2] not in ENDS}
    left = await emptied(server, time.perf_counter())
    return [
        Figure(f"gRPC: ends of {count} calls", counted(found.ends), not odd),
        Figure("gRPC: Abort p50, max", f"{ms(quantile(found.abort_s, 0.5))}, {ms(max(found.abort_s))}"),
        *(Figure(f"gRPC: {figure.what}", figure.value, figure.met) for figure in left),
    ]
