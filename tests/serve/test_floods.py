"""Floods of connections against a real process with few descriptors. `benchmarks/floods.py` has them at full size."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import mlx_engine_pb2, mlx_engine_pb2_grpc

from tests.serve.conftest import Start, Tiny
from tests.serve.gateway import grpc_url
from tests.serve.server import Serve, until
from treadle.keys import Key, digest
from treadle.keys.file import add

RAW_GRPC = Path(__file__).parents[2] / "benchmarks" / "raw_grpc.py"
FEW = 256
LIMITED = ("/bin/sh", "-c", f'ulimit -n {FEW} && exec "$@"', "sh")
LOG_BYTES = 20_000
WATCHES = """
import asyncio, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(600)]
        codes = await asyncio.gather(*[first(call) for call in calls])
        print(codes.count("SERVING"), codes.count("RESOURCE_EXHAUSTED"), flush=True)
        sys.stdin.read()

async def first(call):
    try:
        return "SERVING" if (await call.read()).status == 1 else "not serving"
    except grpc.aio.AioRpcError as error:
        return error.code().name

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny) -> Serve:
    return start_shared(tiny("llama"), "--grpc-port", "0", prefix=LIMITED).ready()


@contextlib.contextmanager
def flood(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """That many connections which say nothing, as far as the server's queue takes them."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(1.0)
            with contextlib.suppress(OSError):
                sock.connect(address)
            held.append(sock)
        yield held


def address_of(url: str) -> tuple[str, int]:
    found = re.search(r"([\d.]+):(\d+)$", url)
    assert found is not None
    return found[1], int(found[2])


def holds_out(server: Serve, log_bytes: int) -> None:
    """New clients' probes are answered, the engine comes back from a kill, and little is logged."""
    server.http.close()
    server.http = type(server.http)(timeout=60, trust_env=False)
    old = server.child()
    for _ in range(10):
        server.http.headers["connection"] = "close"
        assert server.get("/health/live").status_code == 200
    os.kill(old, signal.SIGKILL)
    until("another engine", lambda: server.engines() - {old} and server.is_ready(), 30)
    assert server.process.poll() is None
    assert len(server.said.encode()) - log_bytes < LOG_BYTES


def test_a_flood_of_http_connections_takes_neither_the_probes_nor_the_engines_descriptors(server: Serve) -> None:
    before = len(server.said.encode())
    with flood(address_of(server.url), FEW + 100):
        limit = server.status()["connections"]["http"]["limit"]
        until("a count", lambda: server.status()["connections"]["http"]["open"] == limit)  # none waits for ever
        holds_out(server, before)
        assert server.status()["connections"]["http"]["refused"]["connections"] > 0
    until("room", lambda: server.status()["connections"]["http"]["open"] <= 1)
    assert server.complete().status_code == 200


def test_a_flood_of_grpc_connections_leaves_http_and_the_engine_theirs(server: Serve) -> None:
    before = len(server.said.encode())
    with flood(address_of(grpc_url(server)), FEW + 100):
        limit = server.status()["connections"]["grpc"]["limit"]
        until("a count", lambda: server.status()["connections"]["grpc"]["open"] == limit)  # none waits for ever
        holds_out(server, before)
    assert server.complete().status_code == 200


def test_a_crowd_of_watchers_on_one_connection_is_bounded(server: Serve) -> None:
    host = grpc_url(server).rpartition("/")[2]
    command = [sys.executable, "-c", WATCHES, host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watchers:
        assert watchers.stdout is not None
        try:
            assert watchers.stdout.readline().split() == ["64", "536"]
            assert server.get("/health/live").status_code == 200
            assert server.status()["connections"]["grpc"]["streams"]["refused"] == {"peer_streams": 536}
        finally:
            watchers.kill()


UPLOADS = 40
UPLOAD_BYTES = 3_900_000


def upload(server: Serve, key: str, sent: int) -> socket.socket:
    """An upload of 4 MB of which `sent` bytes have come."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    sock = socket.create_connection(address_of(server.url), 20)
    with contextlib.suppress(ConnectionError):  # it was refused
        sock.sendall(f"{head}content-length: 4000000\r\n\r\n".encode() + b" " * sent)
    return sock


def test_a_crowd_of_slow_uploads_of_one_key_leaves_the_other_keys_theirs(
    start: Start, tiny: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    for name in ("crowd", "other"):
        add(path, Key(name, digest(f"{name}-key".encode())))
    server = start(tiny("llama"), "--api-keys", str(path), "--served-model-name", "m", env={"TREADLE_API_KEY": "admin"})
    server.http.headers["x-api-key"] = "admin"
    server.ready()

    def refused() -> int:
        count: int = server.status()["admission"]["refused"].get("body_bytes", 0)
        return count

    def held() -> int:
        count: int = server.status()["bodies"]["held_bytes"]
        return count

    def complete(key: str, size: int) -> int:
        body, url = b'{"prompt": "hi", "max_tokens": 1}'.ljust(size), f"{server.url}/v1/completions"
        return server.http.post(url, content=body, headers={"x-api-key": key}).status_code

    with contextlib.ExitStack() as stack:

        def settled(uploads: int) -> bool:
            return held() // UPLOAD_BYTES + refused() == uploads

        for i in range(UPLOADS):
            stack.enter_context(upload(server, "crowd-key", UPLOAD_BYTES))
            until("it is read, or refused", functools.partial(settled, i + 1))
        assert held() == (128 << 20) // UPLOAD_BYTES * UPLOAD_BYTES
        assert complete("crowd-key", 1_000) == 200
        assert complete("crowd-key", UPLOAD_BYTES) == 503
        assert complete("other-key", 150_000) == 200
    until("room", lambda: held() == 0)
    assert complete("crowd-key", 150_000) == 200


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of Linux's loopback alone")
def test_calls_that_are_never_sent_take_no_place_of_another_address(server: Serve) -> None:
    before = len(server.said.encode())
    host = grpc_url(server).rpartition("/")[2]
    command = [sys.executable, str(RAW_GRPC), "opened_5000", host, "127.0.0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker, grpc.insecure_channel(host) as channel:
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"holding\n"

            def calls() -> Any:
                return server.status()["connections"]["grpc"]["calls"]

            until("a flood", lambda: calls()["most_of_a_peer"] == calls()["per_peer"])
            until("refusals", lambda: calls()["refused"].get("peer_calls", 0) > 1000)
            stub = mlx_engine_pb2_grpc.MlxEngineStub(channel)
            for _ in range(20):
                assert stub.HealthCheck(mlx_engine_pb2.HealthCheckRequest(), timeout=60).healthy
            assert f'treadle_grpc_calls{{kind="calls"}} {calls()["open"]}.0' in server.get("/metrics").text
        finally:
            attacker.kill()
    until("an end", lambda: calls()["open"] == 0)
    assert len(server.said.encode()) - before < LOG_BYTES


def test_the_banner_says_how_many_may_come(server: Serve) -> None:
    banner = re.compile(r"clients +connections: HTTP 96 \(72 of one address\), gRPC 32 \(24 of one address\)")
    until("it is ready, and says so", lambda: banner.search(server.said))
