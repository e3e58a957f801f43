"""The listener over real sockets: who gets a place, what those get for whom there is none, and when it looks away."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
from typing import Any

import pytest

from tests.fronts.web.server import front
from tests.fronts.web.test_serving import raw, request, served, status_of
from tests.support.aio import in_loop
from treadle.core.refusals import Refusal
from treadle.fronts.connections import Connections
from treadle.fronts.web import listener, protocol
from treadle.fronts.web.listener import ConnectionSlot, Listener
from treadle.fronts.web.serving import WebServer
from treadle.telemetry.access_log import ACCESS

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def full(web: WebServer, port: int, count: int) -> list[asyncio.StreamWriter]:
    """That many silent connections, all accepted."""
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(count)]
    while web.connections < count:
        await asyncio.sleep(0.001)
    return writers


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (LIVE, 200),
        (LIVE.replace(b"/live", b"/ready"), 200),
        (LIVE.replace(b"/live", b""), 200),
        (LIVE.replace(b"GET", b"HEAD"), 200),
        (LIVE.replace(b"/health/live", b"/v1/status"), 200),
        (LIVE.replace(b"/health/live", b"/v1/models"), 503),
        (LIVE.replace(b"GET", b"POST"), 503),
        (request(b'{"prompt":"a"}'), 503),
        (b"", 503),
        (b"GET / HT", 503),
    ],
)
@in_loop
async def test_beyond_the_limit_probes_are_answered_and_others_told_to_come_back(
    data: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these connections is closed after its answer: `raw` reads to the end."""
    monkeypatch.setattr(protocol, "SPARE_S", 0.05)
    books = Connections(2)
    async with front() as f, served(f, connections=books) as (web, port):
        held = await full(web, port, 2)
        answer = await raw(port, data)
        assert status_of(answer) == status
        assert b"connection: close" in answer
        if status == 503:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert json.loads(body)["error"]["code"] == "text_generation_busy"
            assert b"retry-after: 1" in head
        assert books.statistics()["refused"] == {"connections": 1}
        assert books.open == 2
        for writer in held:
            writer.close()


@in_loop
async def test_what_is_the_machines_own_business_is_not_answered_to_others_in_a_spare_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "peer_of", lambda host: "192.0.2.1")
    async with front() as f, served(f, connections=Connections(10, 1)) as (web, port):
        (held,) = await full(web, port, 1)
        assert status_of(await raw(port, LIVE.replace(b"/health/live", b"/v1/status"))) == 503
        refused = await raw(port, LIVE.replace(b"/health/live", b"/v1/models"))
        assert b"your address has as many connections as it can hold" in refused
        assert status_of(await raw(port, LIVE)) == 200
        held.close()


@in_loop
async def test_a_page_can_read_the_refusal_in_a_spare_place(caplog: pytest.LogCaptureFixture) -> None:
    """Its browser asks first, on a connection that has none of the places either."""
    page = "http://localhost:3000"
    asks = f"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {page}\r\n"
    asks += "Access-Control-Request-Method: POST\r\n\r\n"
    with caplog.at_level(logging.INFO, ACCESS):
        async with front(cors_origin=(page,), api_key="k") as f, served(f, connections=Connections(1)) as (web, port):
            (held,) = await full(web, port, 1)
            permission = await raw(port, asks.encode())
            assert status_of(permission) == 204
            assert b"connection: close" in permission
            sent = request(b'{"prompt":"a"}', f"Origin: {page}", "X-Request-Id: mine")
            head = (await raw(port, sent)).partition(b"\r\n\r\n")[0]
            assert status_of(head) == 503
            for answer in (permission, head):
                assert f"access-control-allow-origin: {page}\r\n".encode() in answer
                assert b"x-request-id: " in answer
            assert b"x-request-id: mine" in head
            assert b"retry-after: 1" in head
            foreign = await raw(port, asks.replace(page, "http://evil.example").encode())
            assert (status_of(foreign), b"access-control-allow-origin" in foreign) == (403, False)
            held.close()
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == ACCESS]
    assert [(line["request"], line["error"]) for line in lines if line["status"] == 503] == [
        ("mine", "text_generation_busy")
    ]


@in_loop
async def test_silent_connections_in_spare_places_give_way_to_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are places, and none of them waits for its own deadline."""
    monkeypatch.setattr(protocol, "SPARE_S", 60.0)
    monkeypatch.setattr(listener, "SPARE_SLOTS", 3)
    books = Connections(1)
    async with front() as f, served(f, connections=books) as (web, port):
        held = await full(web, port, 1)
        flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        assert status_of(await raw(port, LIVE)) == 200
        pushed = await asyncio.wait_for(flood[0][0].read(-1), 5)
        assert status_of(pushed) == 503
        assert web.connections <= 1 + 2 * 3
        for writer in [*held, *(writer for _, writer in flood)]:
            writer.close()


@in_loop
async def test_a_freed_place_is_given_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Connections(1)
    async with front() as f, served(f, connections=books) as (web, port):
        (held,) = await full(web, port, 1)
        held.close()
        while books.open:
            await asyncio.sleep(0.001)
        assert status_of(await raw(port, request(b'{"prompt":"a"}', "Connection: close"))) == 200


@in_loop
async def test_several_sockets_of_both_families_share_the_limit() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        six = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    four = socket.create_server(("127.0.0.1", 0))
    books = Connections(1)
    async with front() as f:
        web = WebServer(f.app, connections=books)
        serving = asyncio.create_task(web.serve([four, six]))
        _, held = await asyncio.open_connection("::1", six.getsockname()[1])
        while not books.open:
            await asyncio.sleep(0.001)
        assert status_of(await raw(four.getsockname()[1], request(b'{"prompt":"a"}'))) == 503
        held.close()
        web.stop()
        await serving
        assert (four.fileno(), six.fileno()) == (-1, -1)


class Exhausted:
    """A listening socket whose `accept` fails until `mended`."""

    def __init__(self, sock: socket.socket, code: int) -> None:
        self._sock = sock
        self._code = code
        self.mended = False
        self.asked = 0

    def accept(self) -> Any:
        self.asked += 1
        if not self.mended:
            raise OSError(self._code, "none left")
        return self._sock.accept()

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)


class Silent(asyncio.Protocol):
    answering = False

    def __init__(self, place: ConnectionSlot) -> None:
        self.place = place

    def connection_lost(self, error: Exception | None) -> None:
        self.place.leave()

    def evict(self) -> None:
        raise AssertionError("there is room")


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EIO])
@in_loop
async def test_without_descriptors_it_looks_away_says_so_once_and_goes_on(
    code: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PAUSE_S", 0.02)
    books = Connections(5)
    with socket.create_server(("127.0.0.1", 0)) as real, caplog.at_level(logging.WARNING):
        sock: Any = Exhausted(real, code)
        it = Listener([sock], Silent, books)
        _, writer = await asyncio.open_connection(*real.getsockname())
        while sock.asked < 3:
            await asyncio.sleep(0.001)
        assert len(caplog.messages) == 1
        assert "can't accept HTTP connections (none left)" in caplog.messages[0]
        sock.mended = True
        while not books.open:
            await asyncio.sleep(0.001)
        writer.close()
        while books.open:
            await asyncio.sleep(0.001)
        it.close()
        it.close()
        await it.wait_closed()


@in_loop
async def test_a_closed_listener_accepts_nothing_and_stays_closed_when_a_place_is_freed() -> None:
    books = Connections(0)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        it = Listener([sock], Silent, books)
        place = ConnectionSlot(it, "", Refusal.CONNECTIONS)
        it.close()
        place.leave()
        place.leave()
        _, writer = await asyncio.open_connection(*sock.getsockname())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not books.statistics()["refused"]
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@in_loop
async def test_a_connection_that_ends_while_it_is_accepted_leaves_nothing_behind() -> None:
    books = Connections(5)

    def broken(place: ConnectionSlot) -> asyncio.Protocol:
        raise OSError("it has gone")

    with socket.create_server(("127.0.0.1", 0)) as sock:
        it = Listener([sock], broken, books)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        assert await asyncio.wait_for(reader.read(-1), 5) == b""
        assert books.open == 0
        writer.close()
        it.close()
