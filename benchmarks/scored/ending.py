"""R6: SIGTERM in the middle of four streams."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..client import Reply
from .figures import Figure
from .load import prompt_of
from .server import Server

TOKENS = 1500


async def drain(server: Server) -> list[Figure]:
    """Send one signal; then, with the server started again, two."""
    figures = await once(server)
    await server.start()
    return [*figures, *await twice(server)]


async def once(server: Server) -> list[Figure]:
    streams = await begun(server)
    process = signalled(server)
    began = time.perf_counter()
    await asyncio.sleep(0.05)
    health = [await serving(server)] if server.own else []
    fresh = await server.generate(prompt_of(9), 2, within_s=10.0)
    replies = await asyncio.gather(*streams)
    whole = sum(reply.finished and not reply.error for reply in replies)
    code = await exit_code(process)
    return [
        Figure("streams that came to their end", f"{whole} of 4", whole == 4),
        Figure("a new request meanwhile", str(fresh.status or "not taken"), fresh.status == 503),
        *health,
        Figure("exit code, after", f"{code}, {time.perf_counter() - began:.1f} s", code == "0"),
    ]


async def twice(server: Server) -> list[Figure]:
    streams = await begun(server)
    process = signalled(server)
    await asyncio.sleep(0.2)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    began = time.perf_counter()
    code = await exit_code(process)
    took_s = time.perf_counter() - began
    replies = await asyncio.gather(*streams)
    informed = sum(reply.finished or reply.error == "server_stopping" for reply in replies)
    return [
        Figure("a second signal: exit code, after", f"{code}, {took_s:.2f} s", code == "143" and took_s <= 2.0),
        Figure("a second signal: streams that were told", f"{informed} of 4", informed == 4),
    ]


async def begun(server: Server) -> list[asyncio.Task[Reply]]:
    """Return four streams that have some of their tokens."""
    streams = [asyncio.create_task(server.generate(prompt_of(i), TOKENS, within_s=120.0)) for i in range(4)]
    await asyncio.sleep(0.5)
    return streams


def signalled(server: Server) -> subprocess.Popen[bytes]:
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    return server.process


async def serving(server: Server) -> Figure:
    """Return the answer of `grpc.health.v1` while the server drains."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            answer_name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        except grpc.aio.AioRpcError as error:
            answer_name = str(error.code().name)
    return Figure("gRPC health meanwhile", answer_name, answer_name == "NOT_SERVING")


async def exit_code(process: subprocess.Popen[bytes]) -> str:
    try:
        return str(await asyncio.to_thread(process.wait, 60))
    except subprocess.TimeoutExpired:
        return "did not end"
