"""One connection's deadlines and limits, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterable

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


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
H2C_LIVE = LIVE.replace(b"\r\n\r\n", "\r\n".join(("", *H2C, "", "")).encode())
ASKED = b'{"prompt":"seven b"}'


def sized(body: bytes = ASKED, *extra: str, path: str = "/v1/completions") -> bytes:
    """Return a request with an offer of HTTP/2, as Java's client and `curl --http2` send it."""
    return request(body, *H2C, *extra, path=path)


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", "Host: localhost", *H2C, "Transfer-Encoding: chunked", "", ""))
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return head.encode() + b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


async def send_in_pieces(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    """Send each piece as a packet of its own, on one host."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        for _ in range(3):
            await asyncio.sleep(0)


async def next_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the body of an answer on a connection that is kept."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    return status_of(head), await reader.readexactly(length)


def is_completion(answer: tuple[int, bytes]) -> bool:
    status, body = answer
    return status == 200 and json.loads(body)["usage"]["prompt_tokens"] == len("seven b")


@pytest.mark.parametrize(
    "message",
    [sized(), chunked(ASKED[:4], ASKED[4:]), chunked(ASKED, trailers=b"X-Sum: 1\r\n")],
    ids=["sized", "chunked", "trailers"],
)
@pytest.mark.parametrize("cut", ["whole", "head and body", "within the head", "bytes"])
@in_loop
async def test_a_request_that_offers_another_protocol_is_read_with_its_body(message: bytes, cut: str) -> None:
    """Whatever its packets, and whatever follows it."""
    head_size = message.index(b"\r\n\r\n") + 4
    both = message + LIVE
    at = {"whole": [], "head and body": [head_size], "within the head": [head_size - 1, head_size + 3]}
    cuts = [0, *at.get(cut, range(1, len(both))), len(both)]
    async with front() as f, served(f) as (_, port), connected(port) as (reader, writer):
        await send_in_pieces(writer, [both[start:end] for start, end in itertools.pairwise(cuts)])
        assert is_completion(await next_answer(reader))
        assert (await next_answer(reader))[0] == 200
        writer.write(message)
        assert is_completion(await next_answer(reader))


@in_loop
async def test_requests_that_offer_another_protocol_follow_each_other_in_one_packet() -> None:
    async with front() as f, served(f) as (_, port), connected(port) as (reader, writer):
        writer.write(H2C_LIVE + sized() + sized(b"", path="/none") + chunked(ASKED) + H2C_LIVE + request(ASKED))
        answers = [await next_answer(reader) for _ in range(6)]
        assert [status for status, _ in answers] == [200, 200, 404, 200, 200, 200]
        assert all(is_completion(answers[at]) for at in (1, 3, 5))


@pytest.mark.parametrize("method", ["POST", "CONNECT"])
@pytest.mark.parametrize("apart", [False, True])
@in_loop
async def test_the_body_of_a_request_for_another_protocol_is_never_a_request(method: str, apart: bool) -> None:
    body = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    whole = sized(body, path="http://localhost/none").replace(b"POST", method.encode())
    async with front() as f, served(f) as (_, port), connected(port) as (reader, writer):
        writer.write(whole.removesuffix(body))
        if apart:
            assert (await next_answer(reader))[0] == 404
        writer.write(body)
        if not apart:
            assert (await next_answer(reader))[0] == 404
        writer.write(LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        rest = await asyncio.wait_for(reader.read(-1), 10)
        assert rest.count(b"HTTP/1.1 ") == 1
        assert rest.endswith(b'"reason":""}')


@in_loop
async def test_a_connection_that_was_offered_another_protocol_is_kept() -> None:
    async with front() as f, served(f) as (_, port), connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(H2C_LIVE)
            assert (await next_answer(reader))[0] == 200
            writer.write(request(ASKED))
            assert is_completion(await next_answer(reader))


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        ("Content-Length: 1", 400),
        ("Transfer-Encoding: chunked", 400),
        (f"X: {'y' * 70_000}", 431),
    ],
)
@in_loop
async def test_an_offer_of_another_protocol_does_not_loosen_the_checks_of_heads(framing: str, status: int) -> None:
    """`sized` has a Content-Length already."""
    async with front() as f, served(f) as (_, port):
        answer = await raw(port, sized(ASKED, framing) + LIVE)
        assert status_of(answer) == status
        assert answer.count(b"content-length") == 1


@in_loop
async def test_limits_of_bodies_and_trailers_hold_with_an_offer_of_another_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "REFUSED_BODY_S", 0.2)
    lines = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 990) for i in range(100))
    async with front(max_body_bytes=1000) as f, served(f) as (_, port):
        assert status_of(await raw(port, chunked(trailers=lines))) == 431
        assert status_of(await raw(port, chunked().removesuffix(b"0\r\n\r\n") + b"ZZ\r\n")) == 400
        async with connected(port) as (reader, writer):
            writer.write(sized(bytes(2000))[:-1])  # the last byte never comes
            assert status_of(await asyncio.wait_for(reader.read(-1), 10)) == 413


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
