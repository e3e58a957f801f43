"""Streams whose clients are slow, silent or gone."""

from __future__ import annotations

import asyncio

import pytest

from tests.fronts.web.server import forever, front
from tests.support.aio import in_loop
from tests.support.asgi import post
from treadle.core.messages import CancelReason
from treadle.engine import generation as generation_module
from treadle.errors import ReaderStalled
from treadle.fronts.web.errors import ClientLeft
from treadle.fronts.web.sse import EventStream, while_connected

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "x" * 1000}], "stream": True}


@in_loop
async def test_a_long_prefill_is_not_silent() -> None:
    """After its headers a stream shows a sign of life at least every keepalive_s, also while the prompt is read."""
    async with front(forever, pump=False, keepalive_s=0.01) as f:
        client = post(CHAT, LONG).start(f.app)
        await f.step(2)
        assert client.status == 200
        await client.until(lambda c: c.body.count(b": keep-alive\n\n") >= 3)
        assert client.events == []
        client.leave()
        await f.step(1)
        assert client.task is not None
        await client.task
        assert f.idle()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@in_loop
async def test_a_reader_that_stalls_is_cancelled_and_its_connection_dropped(phase: str) -> None:
    async with front(forever, pump=False, keepalive_s=0.01, stall_s=0.05) as f:
        client = post(CHAT, LONG).start(f.app)
        await f.step(3)
        client.readable.clear()
        if phase == "decode":
            await f.step(30)
        while not client.aborted:
            await asyncio.sleep(0.005)
        client.readable.set()
        await f.step(1)
        assert client.task is not None
        await client.task
        assert f.idle()


@in_loop
async def test_the_engine_learns_that_the_reader_stalled() -> None:
    async with front(forever, pump=False, stall_s=0.05) as f:
        client = post(CHAT, LONG).start(f.app)
        await f.step(30)
        generation, *_ = f.engine.dispatch.generations
        client.readable.clear()
        await f.step(1)
        assert client.task is not None
        await client.task
        assert generation.cancelled is CancelReason.STALLED


@pytest.mark.parametrize(
    ("path", "ends"),
    [
        (CHAT, b'data: {"error":'),
        ("/v1/messages", b"event: error\n"),
        ("/v1/responses", b"event: response.failed\n"),
        ("/api/chat", b'{"error":"the client reads its answer too slowly'),
    ],
)
@in_loop
async def test_a_reader_that_is_too_far_behind_gets_an_error_where_it_reads_again(
    path: str, ends: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection can still take bytes: it is not cut in mid-body."""
    monkeypatch.setattr(generation_module, "MAX_UNREAD_BYTES", 20 * generation_module.TOKEN_BYTES)
    body = {"/v1/responses": {"input": "hi", "stream": True}, "/v1/messages": {**LONG, "max_tokens": 500}}.get(
        path, LONG
    )
    async with front(forever, pump=False, stall_s=3600.0, keepalive_s=3600.0) as f:
        client = post(path, {**body, "model": "m"}).start(f.app)
        await f.step(10)
        (generation,) = f.engine.dispatch.generations
        client.readable.clear()
        await f.step(40)
        assert generation.cancelled is CancelReason.STALLED
        client.readable.set()
        await f.step(2)
        assert client.task is not None
        await client.task
        assert (client.status, client.aborted) == (200, False)
        assert ends in client.body
        assert b"the client reads its answer too slowly" in client.body[client.body.rindex(ends) :]
        assert f.idle()


class Wire:
    """Collects what a stream sends; `block` makes sends hang."""

    def __init__(self) -> None:
        self.sent: list[dict[str, object]] = []
        self.block = False

    async def send(self, message: dict[str, object]) -> None:
        if self.block:
            await asyncio.Event().wait()
        self.sent.append(message)


@in_loop
async def test_a_stall_found_by_the_keep_alive_ends_a_block_that_waits_for_something_else() -> None:
    wire = Wire()
    stalls: list[bool] = []
    stream = EventStream({}, wire.send, keepalive_s=0.01, stall_s=0.01, on_stall=lambda: stalls.append(True))  # type: ignore[arg-type]

    async def wait_within() -> None:
        async with stream.open():
            wire.block = True
            await asyncio.Event().wait()

    with pytest.raises(ReaderStalled):
        await wait_within()
    assert stalls == [True]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@in_loop
async def test_an_active_stream_has_no_keep_alives() -> None:
    wire = Wire()
    stream = EventStream({}, wire.send, keepalive_s=3600, stall_s=1, on_stall=wire.sent.clear)  # type: ignore[arg-type]
    async with stream.open():
        await stream.write(b"data: 1\n\n")
    await stream.end(b"data: 2\n\n")
    assert [m.get("body") for m in wire.sent] == [None, b"data: 1\n\n", b"data: 2\n\n"]


@in_loop
async def test_events_are_sent_in_the_order_in_which_they_were_written() -> None:
    sent: list[object] = []
    full = asyncio.Event()

    async def send(message: dict[str, object]) -> None:
        if message.get("body") == b"data: 1\n\n":
            await full.wait()  # the connection's buffer is full
        sent.append(message.get("body"))

    stream = EventStream({}, send, keepalive_s=3600, stall_s=3600, on_stall=sent.clear)  # type: ignore[arg-type]
    async with stream.open():
        writes = [asyncio.create_task(stream.write(b"data: %d\n\n" % i)) for i in (1, 2, 3)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert sent == [None]
        full.set()
        await asyncio.gather(*writes)
    assert sent == [None, b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]


@in_loop
async def test_work_unwinds_before_the_exchange_ends() -> None:
    unwound = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            unwound.append(True)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeft):
        await while_connected(receive, work())
    assert unwound == [True]


@in_loop
async def test_work_unwinds_also_when_the_server_cancels_the_exchange_twice() -> None:
    """A3: a second cancellation while the first unwinds must not leave the work behind."""
    unwound = []
    go = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await go.wait()
            unwound.append(True)

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    exchange = asyncio.create_task(while_connected(receive, work()))
    for _ in range(3):
        await asyncio.sleep(0)
        exchange.cancel()
    await asyncio.sleep(0)
    assert not exchange.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    assert unwound == [True]


@in_loop
async def test_what_work_raises_is_raised() -> None:
    async def work() -> None:
        raise KeyError("x")

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(KeyError):
        await while_connected(receive, work())
