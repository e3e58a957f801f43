"""The client against servers that are well, busy, or broken, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.aio import in_loop
from treadle.bench.client import Client
from treadle.bench.errors import BenchError
from treadle.bench.plan import PromptMessage, Request
from treadle.bench.samples import Sample

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def said(text: str, finish_reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}).encode()


def chunks(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event) for event in events)


def whole(status: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers])
    return head.encode() + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Client]:
    """A server that reads a whole request, does what `serve` does, and closes."""
    at_work: list[asyncio.Task[None] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_work.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        if b"Content-Length: " in head:
            await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
        with contextlib.suppress(ConnectionError):
            await serve(reader, writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/", silence_s=0.2)
        await asyncio.gather(*filter(None, at_work))


async def ask(serve: Serve, *, stream: bool = True) -> Sample:
    async with serving(serve) as client:
        return await ask_of(client, asyncio.Event(), stream=stream)


async def ask_of(
    client: Client, leave: asyncio.Event, on_pieces: Callable[[int], None] = lambda _: None, *, stream: bool = True
) -> Sample:
    sample = Sample(id="1", role="all", due_s=0.0, sent_s=0.0)
    request = Request("1", (PromptMessage("user", "Hi"),), 4, stream=stream)
    await client.send(request, sample, leave, model="m", endpoint="chat", extra={}, on_pieces=on_pieces)
    return sample


def sends(*parts: bytes) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return serve


@in_loop
async def test_a_whole_stream_is_ok_and_its_pieces_have_times() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}'
    body = chunks(said("a"), said("b"), said("", "length"), usage, b"data: [DONE]")
    sample = await ask(sends(CHUNKED, body, b"0\r\n\r\n"))
    assert (sample.outcome, sample.reason, sample.status, sample.finish_reason) == ("ok", "", 200, "length")
    assert (sample.prompt_tokens, sample.completion_tokens, sample.tokens, len(sample.piece_s)) == (9, 3, 3, 2)
    assert sample.header_s is not None
    assert 0 < sample.header_s <= sample.piece_s[0] <= sample.piece_s[1] <= sample.end_s


@in_loop
async def test_a_stream_that_ends_with_its_connection_is_whole_too() -> None:
    sample = await ask(sends(UNTIL_CLOSED, said("a") + b"\n\n", DONE))
    assert (sample.outcome, sample.tokens) == ("ok", 1)


@in_loop
async def test_an_answer_in_one_piece_is_ok() -> None:
    body = b'{"choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}'
    sample = await ask(sends(whole("200 OK", body)), stream=False)
    assert (sample.outcome, sample.tokens, len(sample.piece_s)) == ("ok", 2, 1)


@pytest.mark.parametrize(
    ("answer", "reason", "retry_after_s"),
    [
        (
            whole("503 Busy", b'{"error": {"code": "text_generation_busy"}}', "Retry-After: 7"),
            "503 text_generation_busy",
            7.0,
        ),
        (whole("429 Slow", b'{"error": {"type": "rate"}}', "retry-after-ms: 1500"), "429 rate", 1.5),
        (whole("503 Busy", b"later", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT"), "503 later", None),
        (whole("503 Busy", b""), "503 ", None),
    ],
)
@in_loop
async def test_a_refusal_is_a_refusal(answer: bytes, reason: str, retry_after_s: float | None) -> None:
    sample = await ask(sends(answer))
    assert (sample.outcome, sample.reason, sample.retry_after_s) == ("refused", reason, retry_after_s)


ERROR = b'{"error": {"code": "engine_died"}}'


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((whole("500 No", b"<h1>No</h1>"),), "500 <h1>No</h1>"),
        ((whole("404 No", ERROR),), "404 engine_died"),
        ((whole("500 No", b"x" * 1_000_000),), "500 " + "x" * 80),
        ((CHUNKED, chunks(said("a"), b"data: " + ERROR), b"0\r\n\r\n"), "inside a 200: engine_died"),
        ((whole("200 OK", ERROR),), "inside a 200: engine_died"),
        ((whole("200 OK", json.dumps(json.loads(ERROR), indent=2).encode() + b"\n"),), "inside a 200: engine_died"),
        ((CHUNKED, chunks(said("a"), b"data: {torn"), b"0\r\n\r\n"), "inside a 200: not JSON"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "not HTTP"),
        ((), "closed without an answer"),
        ((b"HTTP/1.1 200",), "closed without an answer"),
    ],
)
@in_loop
async def test_an_error_is_a_failure_also_inside_a_200(parts: tuple[bytes, ...], reason: str) -> None:
    sample = await ask(sends(*parts))
    assert sample.outcome == "failed"
    assert sample.reason.startswith(reason)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices": 5}',
        b'data: {"choices": [7, null, {"delta": "x"}, {"delta": {"content": 1}}]}',
        b'data: {"choices": [], "usage": {"prompt_tokens_details": 3, "completion_tokens": "many"}}',
        b"data: ",
        b"event: ping",
        b"\xff\xfe",
    ],
)
@in_loop
async def test_odd_events_do_not_upset_the_client(event: bytes) -> None:
    sample = await ask(sends(CHUNKED, chunks(event, said("a", "stop"), b"data: [DONE]"), b"0\r\n\r\n"))
    assert (sample.outcome, sample.reason) == ("ok", "")


@pytest.mark.parametrize(
    "parts",
    [
        (CHUNKED, chunks(said("a"), said("b"))),
        (CHUNKED, chunks(said("a"), said("b")), b"0\r\n\r\n"),
        (UNTIL_CLOSED, said("a") + b"\n\n" + said("b") + b"\n\n"),
        (UNTIL_CLOSED, said("a") + b"\n\n" + said("b") + b"\n\ndata: [DO"),
    ],
)
@in_loop
async def test_half_a_stream_is_incomplete_and_keeps_what_came(parts: tuple[bytes, ...]) -> None:
    """B4: an answer that breaks off is never counted as one that ended."""
    sample = await ask(sends(*parts))
    assert (sample.outcome, sample.tokens, sample.finish_reason) == ("incomplete", 2, "")
    assert sample.reason


def resets(*parts: bytes) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(*parts)(_, writer)
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return serve


@in_loop
async def test_a_reset_before_the_answer_is_a_failure() -> None:
    sample = await ask(resets())
    assert (sample.outcome, sample.reason, sample.status) == ("failed", "connection reset", 0)


@in_loop
async def test_a_reset_in_an_answer_makes_it_incomplete() -> None:
    came = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(CHUNKED, chunks(said("a")))(reader, writer)
        await came.wait()
        await resets()(reader, writer)

    async with serving(serve) as client:
        sample = await ask_of(client, asyncio.Event(), lambda _: came.set())
    assert (sample.outcome, sample.reason, sample.tokens) == ("incomplete", "connection reset", 1)


def silent_after(*parts: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(*parts)(reader, writer)
        with contextlib.suppress(ConnectionError):
            await reader.read()

    return serve


@pytest.mark.parametrize(
    ("parts", "outcome", "reason"),
    [
        ((), "failed", "no answer in time"),
        ((CHUNKED,), "incomplete", "fell silent"),
        ((CHUNKED, chunks(said("a"))), "incomplete", "fell silent"),
        ((CHUNKED, chunks(said("a", "stop"), b"data: [DONE]")), "ok", ""),
    ],
)
@in_loop
async def test_silence_ends_in_time(parts: tuple[bytes, ...], outcome: str, reason: str) -> None:
    """What was whole before the silence is ok, and its time is when its end came."""
    sample = await ask(silent_after(*parts))
    assert (sample.outcome, sample.reason) == (outcome, reason)
    assert (sample.end_s >= 0.2) == (outcome != "ok")


@in_loop
async def test_leaving_closes_the_connection_and_is_not_the_server_s_failure() -> None:
    closed = asyncio.Event()
    leave = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(CHUNKED, chunks(said("a"), said("b")))(reader, writer)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        closed.set()

    async with serving(serve) as client:
        sample = await ask_of(client, leave, lambda _: leave.set())
        await closed.wait()
    assert (sample.outcome, sample.reason, sample.finish_reason) == ("left", "", "")
    assert sample.tokens


@in_loop
async def test_nobody_there_is_a_failure_of_its_own_kind() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        sample = await ask_of(Client(f"127.0.0.1:{taken.getsockname()[1]}"), asyncio.Event())
    assert sample.outcome == "failed"
    assert sample.reason.startswith("no connection")


@in_loop
async def test_a_key_and_a_path_before_v1_are_sent_along() -> None:
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(whole("200 OK", b"{}"))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        answer = await Client(f"http://127.0.0.1:{port}/llm/v1", api_key="k").get("/v1/models")
    assert (answer.status, answer.json()) == (200, {})
    assert heads[0].startswith(b"GET /llm/v1/models HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in heads[0]


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "http://x:port", "x:0", "x y"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="not a URL of the form"):
        Client(url)
