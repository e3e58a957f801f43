"""Over real sockets: the official SDK, and clients that behave badly at the level of TCP and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.fronts.web.server import Front, forever, front, settle
from tests.support.aio import in_loop
from treadle.fronts.connections import Connections
from treadle.fronts.web import protocol
from treadle.fronts.web.access_log import MalformedLog
from treadle.fronts.web.serving import WebServer
from treadle.telemetry.access_log import ACCESS


@contextlib.asynccontextmanager
async def served(f: Front, **options: Any) -> AsyncIterator[tuple[WebServer, int]]:
    sock = socket.create_server(("127.0.0.1", 0))
    malformed = MalformedLog(f.telemetry.metrics, f.telemetry.access)
    web = WebServer(f.app, malformed=malformed, **options)
    task = asyncio.create_task(web.serve([sock]))
    try:
        yield web, sock.getsockname()[1]
    finally:
        web.stop()
        await task


def sdk(port: int, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", **{"max_retries": 0, **options})


HI: Any = [{"role": "user", "content": "hi"}]


@in_loop
async def test_the_official_sdk_chats_streams_and_completes() -> None:
    async with front(api_key="k") as f, served(f) as (_, port), sdk(port) as client:
        answer = await client.chat.completions.create(model="m", messages=HI, n=2, seed=1, logprobs=True, stop=["!"])
        assert [c.message.content for c in answer.choices] == ["The answer."] * 2
        stream = await client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The answer."
        assert chunks[-1].usage is not None
        assert (await client.completions.create(model="m", prompt="x")).choices[0].text == "The answer."
        assert [m.id async for m in client.models.list()] == ["m"]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_conversation_goes_on_with_all_that_the_official_sdk_received(stream: bool) -> None:
    """Agents send back whole messages, with every key that their library knows."""
    async with front() as f, served(f) as (_, port), sdk(port) as client:
        messages: list[Any] = []
        for _ in range(3):
            messages += HI
            if stream:
                chunks = [
                    c async for c in await client.chat.completions.create(model="m", messages=messages, stream=True)
                ]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                messages.append({**chunks[0].choices[0].delta.model_dump(), "content": text})
            else:
                choice = (await client.chat.completions.create(model="m", messages=messages)).choices[0]
                messages.append(choice.message.model_dump() | {"finish_reason": choice.finish_reason})
        assert [message["content"] for message in messages] == ["hi", "The answer."] * 3
        assert f.idle()


@in_loop
async def test_the_official_sdk_raises_its_typed_errors() -> None:
    async with front(api_key="k") as f, served(f) as (_, port), sdk(port) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=HI, temperature=9)
        assert (caught.value.param, caught.value.code) == ("temperature", "invalid_request")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)
        async with sdk(port) as stranger:
            stranger.api_key = "wrong"
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


@in_loop
async def test_the_official_sdk_raises_an_error_that_comes_within_a_stream() -> None:
    async with front(forever, pump=False) as f, served(f) as (_, port), sdk(port) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI, stream=True))
        while not asking.done():
            await asyncio.sleep(0.001)
            await f.step(1)
        stream = await asking
        await f.engine.stop(0.0)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "server_stopping"


@in_loop
async def test_the_official_sdk_retries_a_503_by_itself_and_succeeds() -> None:
    """The refused call is answered once the slot is free, without a line of the user's code."""
    async with (
        front(pump=False, running=1, waiting=0) as f,
        served(f) as (_, port),
        sdk(port, max_retries=5) as client,
    ):
        asking = [
            asyncio.create_task(client.chat.completions.create(model="m", messages=HI, max_tokens=2)) for _ in range(2)
        ]
        while not all(task.done() for task in asking):
            await asyncio.sleep(0.002)
            if sum(f.engine.gate.statistics()["refused"].values()):
                await f.step(1)
        assert [task.result().choices[0].message.content for task in asking] == ["Th", "Th"]


async def raw(port: int, data: bytes, *, half_close: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if half_close:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(-1), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(body: bytes, *extra: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *extra, "", ""]
    return "\r\n".join(lines).encode() + body


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000, 431),
    ],
)
@in_loop
async def test_what_is_not_http_is_refused_in_the_envelope(data: bytes, status: int) -> None:
    async with front() as f, served(f) as (_, port):
        response = await raw(port, data)
        assert status_of(response) == status
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        assert (await raw(port, request(b'{"prompt":"a"}', "Connection: close"))).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("fails", [False, True])
@in_loop
async def test_connections_have_their_deadline_whatever_the_stall(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stall of years is more milliseconds than an option of a socket holds, and some can't be set at all."""
    monkeypatch.setattr(protocol, "HEADER_S", 0.05)
    if fails:
        monkeypatch.setattr(protocol, "_tune", refuse_options)
    async with front() as f, served(f, stall_s=1e9) as (_, port):
        assert (await raw(port, request(b'{"prompt":"a"}', "Connection: close"))).startswith(b"HTTP/1.1 200")
        assert await raw(port, b"GET / HT") == b"", "a client that stops in its headers is dropped"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def refuse_options(sock: socket.socket, stall_s: float) -> None:
    raise OSError(22, "Invalid argument")


@in_loop
async def test_what_is_not_http_has_its_access_line_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, ACCESS):
        async with front() as f, served(f) as (_, port):
            answers = [await raw(port, b"hello\r\n\r\n") for _ in range(3)]
            answers.append(await raw(port, b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000))
            f.telemetry.access.flush(time.monotonic())
            body = f.telemetry.metrics.render().decode()
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(line["status"], line.get("refused"), line["error"]) for line in lines] == [
        (400, None, "invalid_request"),
        (431, None, "invalid_request"),
        (400, 2, "invalid_request"),
    ]
    assert (lines[0]["method"], lines[0]["path"]) == ("-", "-")
    assert f"x-request-id: {lines[0]['request']}\r\n".encode() in answers[0]
    assert 'treadle_http_requests_total{route="other",status="400"} 3.0' in body
    assert 'treadle_http_requests_total{route="other",status="431"} 1.0' in body


@in_loop
async def test_a_body_that_is_not_http_is_on_the_line_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the application has begun with it or not."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with caplog.at_level(logging.INFO, ACCESS):
        async with front() as f, served(f) as (_, port):
            assert status_of(await raw(port, head + b"ZZ\r\n")) == 400
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            await asyncio.sleep(0.05)
            writer.write(b"ZZ\r\n")
            assert b"400" in await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            await settle()
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(line["path"], line["status"], line["error"]) for line in lines] == [
        ("/v1/completions", 400, "invalid_request")
    ] * 2


@in_loop
async def test_a_chunked_body_is_read() -> None:
    async with front() as f, served(f) as (_, port):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        head += b"Connection: close\r\n\r\n"
        assert status_of(await raw(port, head + b'7\r\n{"promp\r\n7\r\nt":"a"}\r\n0\r\n\r\n')) == 200


@pytest.mark.parametrize("extra", ["X: y", "Connection: keep-alive"])
@in_loop
async def test_an_old_client_gets_its_stream_without_chunks(extra: str) -> None:
    """HTTP/1.0 knows no chunks: they would stand in the middle of the events. The end is the connection's end."""
    async with front() as f, served(f) as (_, port):
        asked = request(b'{"prompt":"x","stream":true,"n":3}', extra).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        head, _, body = (await raw(port, asked)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
        answer = await raw(port, request(b'{"prompt":"x"}', extra).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "The answer."


@in_loop
async def test_an_old_client_that_reads_late_gets_every_byte_of_several_choices() -> None:
    long = 5000.0  # no comment keeps the stream alive, and no stall ends it, however slow this machine is
    async with front(forever, keepalive_s=long, stall_s=long) as f, served(f, stall_s=long) as (_, port):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        body = b'{"prompt":"x","stream":true,"n":4,"max_tokens":2000}'
        await loop.sock_sendall(sock, request(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        while not f.idle() or not f.telemetry.metrics.value("treadle_completion_tokens_total"):
            await asyncio.sleep(0.001)
        received = bytearray()
        while part := await loop.sock_recv(sock, 65536):
            received += part
        sock.close()
        events = bytes(received).partition(b"\r\n\r\n")[2].split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events[:-2]]
        assert "".join(texts) == "x" * 8000


@in_loop
async def test_a_body_over_the_cap_gets_its_413_although_it_is_still_being_sent() -> None:
    async with front(max_body_bytes=100_000) as f, served(f) as (_, port):
        response = await raw(port, request(b"x" * 5_000_000, "Connection: close"))
        assert status_of(response) == 413


@in_loop
async def test_a_client_that_keeps_sending_what_was_refused_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_DISCARDED_BYTES", 1_000_000)
    async with front(max_body_bytes=1000) as f, served(f) as (web, port):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**12}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        while web.connections:
            await asyncio.sleep(0.001)
        del reader


@in_loop
async def test_headers_that_never_end_do_not_hold_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_S", 0.05)
    async with front() as f, served(f) as (web, port):
        assert await raw(port, b"GET / HTTP/1.1\r\nX: ") == b""
        while web.connections:
            await asyncio.sleep(0.001)


@in_loop
async def test_a_connection_too_many_is_told_so_and_holds_nothing() -> None:
    """Idle connections must not take the files that the engine's restart needs."""
    async with front() as f, served(f, connections=Connections(2)) as (web, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        while web.connections < 2:
            await asyncio.sleep(0.001)
        refused = await raw(port, b"")
        assert status_of(refused) == 503
        head, _, body = refused.partition(b"\r\n\r\n")
        assert json.loads(body)["error"]["code"] == "text_generation_busy"
        assert b"retry-after: 1" in head
        idle[0][1].close()
        while web.connections > 1:
            await asyncio.sleep(0.001)
        assert status_of(await raw(port, request(b'{"prompt":"a"}', "Connection: close"))) == 200
        idle[1][1].close()


@pytest.mark.parametrize("how", ["fin", "reset", "pipelined"])
@in_loop
async def test_a_connection_that_goes_away_takes_its_request_along(how: str) -> None:
    async with front(forever, pump=False) as f, served(f) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt":"' + b"x" * 1000 + b'"}'
        writer.write(request(body))
        while f.engine.gate.rows == 0:
            await asyncio.sleep(0.001)
        await f.step(2)
        if how == "pipelined":
            writer.write(request(body))
            await writer.drain()
        if how == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.close()
        while not f.idle():
            await asyncio.sleep(0.001)
            await f.step(1)
        del reader


@in_loop
async def test_a_reader_that_stops_reading_is_dropped_and_its_request_cancelled() -> None:
    """The buffers are bounded: the kernel's, the transport's, then the request ends."""
    async with front(forever, running=2, stall_s=0.2, context=2_000_000) as f, served(f) as (web, port):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, request(b'{"prompt":"x","stream":true}'))
        assert await loop.sock_recv(sock, 1000)
        while web.connections:
            await asyncio.sleep(0.005)
        await settle()
        assert f.idle()
        assert f.telemetry.metrics.value("treadle_cancelled_total") == 1
        sock.close()


@in_loop
async def test_signal_handlers_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with front() as f, served(f) as (web, port):
        while not web.started:
            await asyncio.sleep(0)
        await raw(port, request(b"{}", "Connection: close"))
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@in_loop
async def test_a_stopped_server_ends_the_streams_that_are_left(caplog: pytest.LogCaptureFixture) -> None:
    """Without a traceback: the access log says that they were cut off."""
    async with front(forever) as f:
        async with served(f) as (web, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(b'{"prompt":"x","stream":true}'))
            while f.engine.gate.rows == 0:
                await asyncio.sleep(0.001)
            web.stop(grace_s=0.01)
        writer.close()
        await settle()
        assert f.idle()
    assert [line for line in caplog.records if line.name == "uvicorn.error"] == []
