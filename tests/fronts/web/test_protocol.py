"""One connection's deadlines and limits, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator

import pytest

from tests.fronts.web.server import forever, front
from tests.fronts.web.test_serving import raw, request, served, status_of
from tests.support.aio import in_loop
from treadle.fronts.web import protocol

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drop: bytes, every_s: float) -> None:
    """Returns when the server has ended the connection, though `drop` is sent again and again."""

    async def trickle() -> None:
        while True:
            writer.write(drop)
            await writer.drain()
            await asyncio.sleep(every_s)

    dripping = asyncio.create_task(trickle())
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while await reader.read(65536):
                pass
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    writer.close()


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("bound", "sent", "drop"),
    [
        ("HEADER_S", b"", b"\r\n"),
        ("HEADER_S", b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
        ("HEADER_S", LIVE + b"GET ", b"x"),
        ("KEEP_ALIVE_S", LIVE, b"\r\n"),
        ("REFUSED_BODY_S", b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n", b"x"),
        (
            "REFUSED_BODY_S",
            b"POST /none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9999\r\n\r\n",
            b"x",
        ),
    ],
    ids=["silent", "headers", "the next headers", "idle", "refused body", "refused body, closing"],
)
@in_loop
async def test_bytes_do_not_extend_a_deadline(
    bound: str, sent: bytes, drop: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drop comes well within the deadline, and the connection ends all the same."""
    for name in ("HEADER_S", "KEEP_ALIVE_S", "REFUSED_BODY_S"):
        monkeypatch.setattr(protocol, name, 0.2 if name == bound else 60.0)
    monkeypatch.setattr("treadle.fronts.web.serving.KEEP_ALIVE_S", protocol.KEEP_ALIVE_S)
    async with front() as f, served(f) as (web, port), connected(port) as (reader, writer):
        writer.write(sent)
        await ends(reader, writer, drop, 0.02)
        while web.connections:
            await asyncio.sleep(0.001)


@in_loop
async def test_a_refused_body_that_comes_whole_leaves_the_connection_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as f, served(f) as (_, port), connected(port) as (reader, writer):
        writer.write(b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        assert b"404" in await reader.readline()
        writer.write(b"0123456789" + LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(-1), 10)


@in_loop
async def test_a_request_that_runs_has_no_deadline_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the beginning of the next request, sent along with it, give it one."""
    for name in ("HEADER_S", "REFUSED_BODY_S", "KEEP_ALIVE_S"):
        monkeypatch.setattr(protocol, name, 0.01)
    async with front(pump=False) as f, served(f) as (_, port), connected(port) as (reader, writer):
        writer.write(request(b'{"prompt":"a"}') + b"GET /hea")
        while f.engine.gate.rows == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        while not f.idle():
            await f.step(1)
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), 10)


@pytest.mark.parametrize("size", [70_000, 150_000, 250_000])
@in_loop
async def test_headers_over_the_limit_are_refused_also_in_one_piece(size: int) -> None:
    async with front() as f, served(f) as (_, port):
        lines = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 990) for i in range(size // 1000))
        assert status_of(await raw(port, LIVE[:-2] + lines + b"\r\n")) == 431
        assert status_of(await raw(port, LIVE.replace(b"/live", b"/" + b"y" * size))) == 431
        some = lines[:60_000].rpartition(b"\r\n")[0]
        assert status_of(await raw(port, LIVE[:-2] + some + b"\r\nConnection: close\r\n\r\n")) == 200


@in_loop
async def test_trailers_count_as_headers() -> None:
    async with front() as f, served(f) as (_, port):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        trailers = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 990) for i in range(100))
        assert status_of(await raw(port, head + trailers)) == 431


@in_loop
async def test_nothing_is_written_into_another_answer() -> None:
    async with front(forever) as f, served(f) as (web, port), connected(port) as (reader, writer):
        writer.write(request(b'{"prompt":"a","stream":true,"max_tokens":2000}'))
        await reader.readuntil(b"\n\n")
        writer.write(b"this is not HTTP\r\n\r\n")
        rest = await asyncio.wait_for(reader.read(-1), 10)
        assert b"HTTP/1.1 400" not in rest
        while web.connections or not f.idle():
            await asyncio.sleep(0.001)


@in_loop
async def test_a_large_body_is_taken_in_for_the_sake_of_its_413() -> None:
    """A client that reads no answer before it has sent everything would see a broken pipe instead."""
    async with front(max_body_bytes=1000) as f, served(f) as (_, port), connected(port) as (reader, writer):
        size = 100 * 1024 * 1024
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(100):
            writer.write(bytes(1024 * 1024))
            await writer.drain()
        assert b"413" in await asyncio.wait_for(reader.readline(), 10)


@in_loop
async def test_half_a_close_is_a_whole_one() -> None:
    """docs/operations.md says so: nobody could tell it from a client that has left."""
    async with front(forever, pump=False) as f, served(f) as (_, port):
        asking = asyncio.create_task(raw(port, request(b'{"prompt":"a"}'), half_close=True))
        answer = await asyncio.wait_for(asking, 60)
        assert answer == b""
        while not f.idle():
            await f.step(1)


@in_loop
async def test_writes_to_a_connection_that_was_just_lost_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio has a line for each of them from the fifth on."""
    with caplog.at_level(logging.WARNING, "asyncio"):
        async with front() as f, served(f), contextlib.AsyncExitStack() as stack:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                _, writer = await asyncio.open_connection(*listening.getsockname())
                stack.callback(writer.close)
                writer.transport.abort()
                for _ in range(10):
                    writer.transport.write(b"x")
                logging.getLogger("asyncio").warning("something else")
    assert caplog.messages == ["something else"]


@in_loop
async def test_a_client_that_asks_for_another_protocol_is_answered_in_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with front() as f, served(f) as (_, port):
            upgrade = b"\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
            answer = await raw(port, LIVE.replace(b"\r\n\r\n", upgrade))
            assert status_of(answer) == 200
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["status"] == "ok"
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/health/live", "evil.example", 200),
        ("http://[::1]:8000/health/live", "localhost", 200),
        ("http://evil.example/health/live", "localhost", 403),
        ("http://localhost@evil.example/health/live", "localhost", 400),
        ("/health/live?next=http://evil.example/", "localhost", 200),
    ],
)
@in_loop
async def test_the_host_in_an_absolute_target_is_the_one_that_counts(target: str, host: str, status: int) -> None:
    """RFC 9112, 3.2.2: behind it a browser's page could ask by another name than the guard reads."""
    async with front() as f, served(f) as (_, port):
        answer = await raw(port, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert status_of(answer) == status


@pytest.mark.parametrize("codings", ["identity\r\nTransfer-Encoding: chunked", "gzip, chunked", "chunked, chunked"])
@in_loop
async def test_only_chunks_alone_are_a_transfer_coding(codings: str) -> None:
    """Where proxies and servers disagree on a body's end, what follows it is another's request."""
    body = b"0\r\n\r\nGET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with front() as f, served(f) as (_, port):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {codings}\r\n\r\n".encode()
        answer = await raw(port, head + body)
        assert status_of(answer) == 400
        assert answer.count(b"content-length") == 1
