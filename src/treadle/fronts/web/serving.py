"""The HTTP server on sockets that are already listening: uvicorn, with our limits and none of its signal handlers.

A connection is dropped when its headers come too slowly or are too large, when it goes on sending a body that was
already refused, or when the client's machine has vanished. One too many is told so and closed at once: without a file
to spare the engine could not be started again, and nobody would be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ...errors import Busy, InvalidRequest, TreadleError
from .errors import envelope, headers_of
from .sse import ABORT

HEADER_S = 20.0
MAX_HEADER_BYTES = 64 * 1024
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
MAX_PIPELINED = 4
LINGER_S = 5.0
KEEP_ALIVE_S = 75
SEND_BUFFER_BYTES = 128 * 1024
PROBE_S = 15


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Handlers find `scope[ABORT]`, which drops it with all that is buffered."""

    stall_s = 30.0
    max_connections: int | None = None
    _running: RequestResponseCycle | None = None
    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _discarded_bytes = 0
    _body_done = True
    _lingering = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            self._refuse(Busy("the server is busy: it has as many connections as it can hold", retry_after_s=1.0))
            return
        _tune(transport.get_extra_info("socket"), self.stall_s)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._headers_over()
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data) if self._header_timer is not None else 0
        super().data_received(data)
        if self._header_timer is not None and self._header_bytes > MAX_HEADER_BYTES and not self._closing:
            self._refuse(InvalidRequest(f"the request's headers are over {MAX_HEADER_BYTES} bytes: send less"), 431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[ABORT] = self.transport.abort
        self._discarded_bytes = 0
        self._body_done = False
        if self._header_timer is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._headers_over()
        super().on_headers_complete()
        if self.flow.read_paused and len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()  # a paused connection would not show that its client has left

        self.cycle.transport = cast("asyncio.Transport", _LateClose(self))
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unframed(self.cycle)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._body_done = True
        if self._lingering:
            self.transport.close()

    def close_late(self) -> None:
        """Close once the client has sent the body it began: closing earlier would make it lose the answer."""
        if self._body_done:
            self.transport.close()
        elif not self._lingering:
            self._lingering = True
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            InvalidRequest("this is not HTTP/1.1 as the server understands it: check the request's first lines")
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _closing(self) -> bool:
        return bool(self.transport.is_closing())

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_S, self.transport.abort)

    def _headers_over(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: TreadleError, status: int | None = None) -> None:
        """Answer where there is no request to answer, and hang up."""
        body = msgspec.json.encode(envelope(error))
        retry = b"".join(b"%s: %s\r\n" % line for line in headers_of(error))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(STATUS_LINE[status or error.http_status] + head + retry + b"\r\n" + body)
        self.transport.close()


class _LateClose:
    """The transport as a request's cycle uses it."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.close_late()


class _Unframed:
    """`cycle.send` for an HTTP/1.0 client, which knows no chunks: a body of unknown length ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._sized = True

    async def __call__(self, message: Any) -> None:
        cycle = self._cycle
        while cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()  # here, so that nothing comes between the length and its part of the body
        if message["type"] == "http.response.start":
            self._sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if self._sized else False
        elif not self._sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class WebServer:
    """Serves one application until told to stop. The sockets stay open until then, also while the server drains."""

    def __init__(self, app: Any, *, stall_s: float = 30.0, max_connections: int | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=type("Protocol", (GuardedProtocol,), {"stall_s": stall_s, "max_connections": max_connections}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Uvicorn(config)

    @property
    def started(self) -> bool:
        """The sockets are being listened to."""
        return self._server.started

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._server.server_state.connections)

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on `sockets`; returns after `stop`, with all connections ended and the sockets closed."""
        await self._server.serve(sockets=list(sockets))

    def stop(self, grace_s: float = 1.0) -> None:
        """Close the listener, let open requests end for up to `grace_s`, then end them."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _tune(sock: socket.socket, stall_s: float) -> None:
    """A small buffer, so that a reader who stalls is noticed soon, and an end to connections whose peer vanished."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    unanswered_ms = int(1000 * max(stall_s, 2 * PROBE_S))
    for name, value in (("TCP_KEEPIDLE", PROBE_S), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", unanswered_ms)):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
