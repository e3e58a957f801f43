"""Rows that only Treadle can be measured by: they kill its engine, fill its cache, and look behind its key."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
from client import Reply
from smg_grpc_proto import mlx_engine_pb2_grpc, vllm_engine_pb2_grpc

from .figures import Figure, auc, ms
from .portable import prompt_of
from .server import Server, treadle

SHUT = {"UNAUTHENTICATED", "UNIMPLEMENTED"}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
LONG = 800


# R3: death and hang -------------------------------------------------------------------------------------------------


async def faults(model: Path, log: Path) -> list[Figure]:
    """The engine is killed, and stopped, in the middle of eight streams."""
    server = treadle(model, log, ("--max-running", "8", "--hang-after", "5"))
    await server.start()
    try:
        calm = [(await server.generate(prompt_of(index), LONG)).text for index in range(8)]
        figures = []
        for name in ("SIGKILL", "SIGSEGV", "SIGSTOP"):
            figures += await struck(server, getattr(signal, name), name, calm)
            await settled(server)
        return figures
    finally:
        await server.stop()


async def struck(server: Server, number: int, name: str, calm: list[str]) -> list[Figure]:
    streams = [asyncio.create_task(server.generate(prompt_of(i), LONG, within_s=120.0)) for i in range(8)]
    await asyncio.sleep(0.3)
    server.engine().send_signal(number)
    began = time.perf_counter()
    gone_s = await until_ready(server, ready=False, within_s=40.0) - began
    back_s = await until_ready(server, ready=True, within_s=60.0) - began
    replies = await asyncio.gather(*streams)
    same = sum(reply.text == text and reply.finished for reply, text in zip(replies, calm, strict=True))
    ended = sum(bool(reply.finished or reply.error) for reply in replies)
    bound = 30.0 if name == "SIGSTOP" else 1.0
    return [
        Figure(f"{name}: ready says 503 after", ms(gone_s), gone_s <= bound),
        Figure(f"{name}: serving again after", f"{back_s:.1f} s", back_s <= bound + 10.0),
        Figure(f"{name}: streams that heard their end", f"{ended} of 8", ended == 8),
        Figure(f"{name}: streams that came to it with the tokens of a calm run", f"{same} of 8", same == 8),
    ]


async def until_ready(server: Server, *, ready: bool, within_s: float) -> float:
    """The time when `/health/ready` first said so."""
    until = time.perf_counter() + within_s
    while time.perf_counter() < until:
        if ((await server.get("/health/ready")).status == 200) == ready:
            return time.perf_counter()
        await asyncio.sleep(0.005)
    return float("inf")


async def settled(server: Server) -> None:
    """Wait until the server answers and nothing of before is left."""
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        await asyncio.sleep(0.1)
        answers = (await server.generate("Hello", 1)).status == 200
        if answers and not (await server.get("/v1/status")).json()["admission"]["rows"]:
            return


# R5: memory ---------------------------------------------------------------------------------------------------------


async def oversubscribed(model: Path, log: Path, memory: str = "6MiB") -> list[Figure]:
    """Sixteen rows that ask for more than the cache holds, against each of them alone."""
    server = treadle(model, log, ("--max-running", "16", "--memory", memory, "--max-wait", "60"))
    await server.start()
    try:
        alone = [(await server.generate(prompt_of(i, 300), LONG)).text for i in range(16)]
        before = (await server.get("/v1/status")).json()["engine"]
        replies = await asyncio.gather(*(server.generate(prompt_of(i, 300), LONG, within_s=120.0) for i in range(16)))
        after = (await server.get("/v1/status")).json()["engine"]
        same = sum(reply.text == text for reply, text in zip(replies, alone, strict=True))
        preempted = after.get("preempted", 0) - before.get("preempted", 0)
        return [
            Figure("answers identical to those alone", f"{same} of 16", same == 16),
            Figure("preempted meanwhile", str(preempted), preempted > 0),
            Figure("restarts of the engine", str(after["restarts"]), after["restarts"] == 0),
        ]
    finally:
        await server.stop()


# S1: routes and keys ------------------------------------------------------------------------------------------------


async def behind_the_key(model: Path, log: Path) -> list[Figure]:
    """Every route and method without a key and with a wrong one; every gRPC method with a wrong one."""
    key = secrets.token_urlsafe(16)
    options = ("--grpc-port", "0", "--max-running", "2")
    server = treadle(model, log, options, {"TREADLE_API_KEY": key})
    try:
        await with_key_started(server, key)
        paths = [
            *(await asyncio.to_thread(fetched, server, key, "/openapi.json"))["paths"],
            "/",
            "/docs",
            "/openapi.json",
            "/nowhere",
            "/metrics",
        ]
        seen, opened = Counter[int](), set[str]()
        for path in paths:
            for method in METHODS:
                status = await asyncio.to_thread(plain, server, method, path)
                seen[status] += 1
                if status != 401:
                    opened.add(f"{method} {path}")
        answers = ", ".join(f"{count} {status}" for status, count in sorted(seen.items()))
        wrong = await over_grpc(server, "wrong")
        return [
            Figure(f"{len(paths)} paths x {len(METHODS)} methods without a key", answers),
            Figure("open", ", ".join(sorted(opened)) or "none", opened <= {"GET /health/live"}),
            Figure(
                "gRPC methods with a wrong key", wrong, set(wrong.split(", ")) <= {"UNAUTHENTICATED", "UNIMPLEMENTED"}
            ),
        ]
    finally:
        await server.stop()


async def with_key_started(server: Server, key: str) -> None:
    """Start a server that wants a key; returns once it is ready."""
    starting = asyncio.create_task(server.start())
    try:
        until = time.perf_counter() + 60
        while time.perf_counter() < until:
            await asyncio.sleep(0.2)
            if server.port and await asyncio.to_thread(plain, server, "GET", "/health/ready", key) == 200:
                return
        raise SystemExit("the server with a key was not ready within 60 s")
    finally:
        starting.cancel()


def plain(server: Server, method: str, path: str, key: str | None = None) -> int:
    """The status of one request; 0 where none came."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = Request(f"http://127.0.0.1:{server.port}{path}", method=method, headers=headers)
    try:
        with urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except OSError as error:
        return int(getattr(error, "code", 0))


def fetched(server: Server, key: str, path: str) -> dict[str, Any]:
    """A route's JSON."""
    request = Request(f"http://127.0.0.1:{server.port}{path}", headers={"Authorization": f"Bearer {key}"})
    with urlopen(request, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def grpc_address(server: Server) -> str:
    """The port that the operating system chose, as the server's first lines tell it."""
    found = re.search(r"grpc://([\w.:\[\]]+)", server.log.read_text())
    if found is None:
        raise SystemExit(f"the server named no gRPC address: see {server.log}")
    return found[1]


async def over_grpc(server: Server, given: str) -> str:
    """The status codes of every method of both wires with the key `given`."""
    address = grpc_address(server)
    codes = Counter[str]()
    async with grpc.aio.insecure_channel(address) as channel:
        for module in (mlx_engine_pb2_grpc, vllm_engine_pb2_grpc):
            for name, path in methods(module):
                call = channel.unary_unary(path, request_serializer=None, response_deserializer=None)
                try:
                    await call(b"", metadata=(("authorization", f"Bearer {given}"),), timeout=10)
                    codes[f"OK {name}"] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code().name] += 1
    return ", ".join(sorted(codes))


def methods(module: object) -> list[tuple[str, str]]:
    """Name and path of each method of a generated service."""
    found: list[tuple[str, str]] = []

    class Listing:
        def __getattr__(self, kind: str) -> object:
            return lambda path, **_: found.append((path.rpartition("/")[2], path))

    stub = next(value for name, value in vars(module).items() if name.endswith("EngineStub"))
    stub(Listing())
    return found


# S3: who shares what ------------------------------------------------------------------------------------------------


async def tenants(model: Path, log: Path) -> list[Figure]:
    """Whether times tell one salt's clients what another's sent; and within one, where they may."""
    server = treadle(model, log)
    await server.start()
    try:
        return [await timing(server, salted=True), await timing(server, salted=False)]
    finally:
        await server.stop()


async def timing(server: Server, *, salted: bool, rounds: int = 60) -> Figure:
    """How well an answer's first token tells that somebody else has sent the same prompt before."""

    async def ttft(prompt: str, salt: str) -> float:
        more = {"cache_salt": salt} if salted else {}
        reply: Reply = await server.generate(prompt, 2, **more)
        return reply.ttft_s

    known: list[float] = []
    fresh: list[float] = []
    for index in range(rounds):
        theirs, nobodys = (secrets.token_hex(1500) for _ in range(2))
        await ttft(theirs, "one")
        pair = [(known, theirs), (fresh, nobodys)]
        for times, prompt in pair if index % 2 else reversed(pair):
            times.append(await ttft(prompt, "two"))
    found = auc(fresh, known)
    what = "AUC between two salts" if salted else "AUC within one tenant, who shares prompts"
    return Figure(what, f"{found:.3f}", abs(found - 0.5) <= 0.05 if salted else None)
