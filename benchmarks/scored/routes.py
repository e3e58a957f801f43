"""S1: keys required by each route, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
from smg_grpc_proto import mlx_engine_pb2_grpc, vllm_engine_pb2_grpc

from .figures import Figure, counted
from .server import Server, treadle

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
OPEN = {"GET /health/live"}
FLUSH = "/vllm.grpc.engine.VllmEngine/FlushCache"
SHUT = {"UNAUTHENTICATED", "UNIMPLEMENTED"}
MORE_PATHS = (
    "/",
    "/docs",
    "/openapi.json",
    "/redoc",
    "/nowhere",
    "/metrics",
    "/v1/status",
    "/health/live/",
    "//metrics",
)
ADMIN = {
    "GET /metrics": None,
    "POST /v1/prefix_cache/reset": {},
    "POST /v1/completions": {"prompt": "a", "max_tokens": 1, "priority": -1},
}
LAN = (("--host", "0.0.0.0"), ("--grpc-host", "0.0.0.0", "--grpc-port", "0"))


def keys_file(folder: Path, **scopes: str) -> tuple[Path, dict[str, str]]:
    """Make a keys file with `treadle keys add`; return it, and the keys by their names."""
    file, keys = folder / f"keys-{secrets.token_hex(4)}.toml", {}
    for name, scope in scopes.items():
        command = [sys.executable, "-m", "treadle", "keys", "add", name, "--scope", scope, "--api-keys", str(file)]
        keys[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return file, keys


async def behind_the_key(model: Path, log: Path) -> list[Figure]:
    """Try every route and method without a key and with a wrong one; routes beyond the scope `use`; every gRPC
    method."""
    file, keys = keys_file(log.parent, alice="use", ops="admin")
    options = ("--grpc-port", "0", "--grpc-auth", "--max-running", "2", "--api-keys", str(file))
    server = treadle(model, log, options, key=keys["ops"])
    await server.start()
    try:
        paths = [*(await server.get("/openapi.json")).json()["paths"], *MORE_PATHS]
        return [
            await asyncio.to_thread(tried, server, paths, {}, "without a key"),
            await asyncio.to_thread(tried, server, paths, bearer(secrets.token_hex(32)), "with a wrong key"),
            *await asyncio.to_thread(scoped, server, keys),
            *await over_grpc(server, keys["alice"]),
            *await asyncio.to_thread(beyond_loopback, model),
        ]
    finally:
        await server.stop()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def tried(server: Server, paths: list[str], headers: Mapping[str, str], condition: str) -> Figure:
    """Try every path with every method."""
    statuses, opened = Counter[str](), set[str]()
    for path in paths:
        for method in METHODS:
            status = status_of(server, f"{method} {path}", headers)
            statuses[str(status)] += 1
            if status != 401:
                opened.add(f"{method} {path}")
    what = f"{len(paths)} paths x {len(METHODS)} methods {condition}"
    return Figure(what, f"{counted(statuses)}; open: {', '.join(sorted(opened)) or 'none'}", opened <= OPEN)


def status_of(server: Server, what: str, headers: Mapping[str, str], body: Any = None) -> int:
    """Return the status of one request; 0 if none came."""
    method, path = what.split(" ", 1)
    data = None if body is None else json.dumps(body).encode()
    content_type = {"Content-Type": "application/json"} if data else {}
    request = Request(f"http://127.0.0.1:{server.port}{path}", data, {**headers, **content_type}, method=method)
    try:
        with urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except OSError as error:
        return int(getattr(error, "code", 0))


def scoped(server: Server, keys: Mapping[str, str]) -> list[Figure]:
    """Compare the scopes `use` and `admin` on the routes of the latter."""
    found = []
    for what, body in ADMIN.items():
        use, admin = (status_of(server, what, bearer(keys[name]), body) for name in ("alice", "ops"))
        title = what if not body else f"{what} with `priority` -1"
        found.append(Figure(f"{title}: scope `use`, `admin`", f"{use}, {admin}", (use, admin) == (403, 200)))
    return found


# gRPC ---------------------------------------------------------------------------------------------------------------


async def over_grpc(server: Server, use: str) -> list[Figure]:
    without, wrong = await codes(server, {}), await codes(server, {"authorization": "Bearer wrong"})
    flush = (await codes(server, {"authorization": f"Bearer {use}"}))[FLUSH]
    return [
        Figure(f"{len(without)} gRPC methods without a key (`--grpc-auth`)", *judged(without)),
        Figure(f"{len(wrong)} gRPC methods with a wrong key", *judged(wrong)),
        Figure("gRPC FlushCache with the scope `use`", flush, flush == "PERMISSION_DENIED"),
    ]


def judged(found: Mapping[str, str]) -> tuple[str, bool]:
    return counted(Counter(found.values())), {*found.values()} <= SHUT


async def codes(server: Server, metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the status of every method of both wires, by its path."""
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        paths = (path for module in (mlx_engine_pb2_grpc, vllm_engine_pb2_grpc) for path in methods(module))
        return {path: await called(channel, path, metadata) for path in paths}


async def called(channel: grpc.aio.Channel, path: str, metadata: Mapping[str, str]) -> str:
    call = channel.unary_unary(path, request_serializer=None, response_deserializer=None)
    try:
        await call(b"", metadata=tuple(metadata.items()), timeout=10)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


def methods(module: object) -> list[str]:
    """Return the path of each method of a generated service."""
    found: list[str] = []

    class Listing:
        def __getattr__(self, kind: str) -> object:
            return lambda path, **_: found.append(path)

    stub = next(value for name, value in vars(module).items() if name.endswith("EngineStub"))
    stub(Listing())
    return found


def beyond_loopback(model: Path) -> list[Figure]:
    """Start a server that would be open to the network without a key."""
    found = []
    for options in LAN:
        command = [sys.executable, "-m", "treadle", "serve", str(model), "--port", "0", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            code = f"refused, exit code {done.returncode}" if done.returncode == 2 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            code = "it serves"
        found.append(Figure(f"`{' '.join(options[:2])}` without a key", code, code.startswith("refused")))
    return found
