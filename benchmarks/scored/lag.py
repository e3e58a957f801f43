"""R7: latency of the cheapest route while clients send expensive requests."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ..hostile_bodies import SHAPES, rpc_sender, sender
from .figures import Figure, as_seen, ms, quantile
from .load import Answers, probed, prompt_of
from .server import Server, treadle

CLIENTS = 4
BYTES = 8_000_000 - 1000
EVERY_S = 0.01
BEFORE_S = 1.5
BOUND_S = 0.02
NICE = 19
RUNNING = ("--max-running", "4")
OPTIONS = (*RUNNING, "--max-body-bytes", "16MiB")  # so that bodies are read and parsed, and not refused by length


async def event_loop(server: Server, seconds: float = 8.0) -> list[Figure]:
    """Send honest long prompts, then each hostile body, from four clients at a time. A server that ends is started
    again."""
    idle = lag("nothing else: the machine's own share", await probed(server, server.probe, seconds, EVERY_S))
    figures = [replace(idle, met=None)]
    figures.append(lag("four clients with long prompts", await honestly(server, seconds)))
    for shape, make in SHAPES.items():
        clients = [(sender, ("127.0.0.1", server.port, make(BYTES)))] * CLIENTS
        figures.append(lag(f"four clients with 8 MB: {shape}", await pressed(server, seconds, clients)))
        if not server.is_running:
            figures.append(Figure(f"after 8 MB: {shape}", "the server had ended", False))
            await server.start()
    return figures


async def floods(model: Path, log: Path, seconds: float = 8.0) -> list[Figure]:
    """Do the same over gRPC, with the limits that follow from the context; and return the server's own event-loop
    lag."""
    server = treadle(model, log, (*RUNNING, "--grpc-port", "0"))
    await server.start()
    try:
        figures = []
        for shape, what in (("ids", "Generate of 8 million ids"), ("abort", "Abort of 900,000 ids")):
            clients = [(rpc_sender, (server.grpc, shape, BYTES))] * CLIENTS
            figures.append(lag(f"gRPC: four clients with {what}", await pressed(server, seconds, clients)))
        loop = (await server.status())["event_loop_lag"]
        value = f"p99 {loop['p99_ms']:.1f} ms, max {loop['max_ms']:.0f} ms"
        return [*figures, Figure("gRPC: the loop's own lag, as the server tells it", value)]
    finally:
        await server.stop()


async def honestly(server: Server, seconds: float) -> Answers:
    """Probe while four clients generate from prompts of 6,000 characters, each a new one."""
    numbers = iter(range(10**9))

    async def client() -> None:
        while True:
            await server.generate(prompt_of(next(numbers), 6000), 16)
            await asyncio.sleep(0)

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    answers = await probed(server, server.probe, seconds, EVERY_S)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return answers


async def pressed(server: Server, seconds: float, clients: list[tuple[Callable[..., None], Any]]) -> Answers:
    """Probe while processes of their own send without a pause. They run at a low priority, as attackers have their own
    processors: on this machine they would take the server's."""
    context = multiprocessing.get_context("spawn")
    stop, counts = context.Event(), context.SimpleQueue()
    senders = [context.Process(target=work, args=(*args, stop, counts), daemon=True) for work, args in clients]
    for process in senders:
        process.start()
        psutil.Process(process.pid).nice(NICE)
    await asyncio.sleep(BEFORE_S)
    answers = await probed(server, server.probe, seconds, EVERY_S)
    stop.set()
    await asyncio.to_thread(finish, senders)
    return answers


def finish(senders: list[Any]) -> None:
    """End the senders without waiting for their answers."""
    for process in senders:
        process.join(2.0)
        with contextlib.suppress(ValueError):
            process.kill()
        process.join(5.0)


def lag(what: str, answers: Answers) -> Figure:
    took = as_seen([seconds for _, seconds in answers], EVERY_S)
    silent = sum(status != 200 for status, _ in answers)
    worst = quantile(took, 0.99)
    value = f"p50 {ms(quantile(took, 0.5))}, p99 {ms(worst)}, max {ms(max(took, default=float('nan')))}"
    return Figure(what, value + (f", {silent} without an answer" if silent else ""), not silent and worst <= BOUND_S)
