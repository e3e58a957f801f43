"""Protocol of one HTTP connection: uvicorn's, with deadlines and limits.

A connection has one deadline while it runs no request: for its headers, for the rest of a body that was answered early,
for its next request. Arriving bytes do not extend it. While a request runs, its body has the limits of `body.py` and
its reader those of `sse.py`. A connection is also dropped when its headers are too large, or when the client's machine
has vanished. A client that closes its sending side has left: its running request is cancelled. `Upgrade` is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ...core.refusals import Refusal
from ...errors import Busy, InvalidRequest, TreadleError
from .access_log import PROTOCOL_ERROR, MalformedLog
from .errors import error_shape, headers_of
from .guard import REFUSAL
from .listener import ConnectionSlot
from .sse import ABORT
from .uvicorn_cycles import DeferredClose, Http10Send

HEADER_S = 20.0
MAX_HEADER_BYTES = 64 * 1024
MAX_DISCARDED_BYTES = 1024**3
MAX_PIPELINED = 4
REFUSED_BODY_S = 30.0
LINGER_S = 5.0
KEEP_ALIVE_S = 75
SPARE_S = 1.0  # for the request of a connection in a spare slot
SEND_BUFFER_BYTES = 128 * 1024
PROBE_S = 15
MAX_OPTION = 2**31 - 1  # of a socket: a C int
PROBES = frozenset({b"/health", b"/health/live", b"/health/ready"})
LOCAL_PROBES = PROBES | {b"/v1/status", b"/metrics"}
FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Handlers find `scope[ABORT]`, which drops it with all buffered data. The application must refuse
    a request that has an error in `scope[REFUSAL]`."""

    stall_s = 30.0
    malformed: MalformedLog | None = None
    slot: ConnectionSlot
    _running: RequestResponseCycle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _unparsed_bytes = 0  # of incomplete headers
    _field_bytes = 0  # of the headers and trailers of the current message
    _discarded_bytes = 0
    _in_headers = False
    _body_done = True
    _lingering = False
    _oversized = False
    _discarding = False  # refused: further input is discarded

    # The connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.slot.connection = self
        if self.slot.refusal is None:
            self._set_deadline(HEADER_S, transport.abort)
        else:
            self._set_deadline(SPARE_S, self.evict)
        with contextlib.suppress(OSError):  # the client has left already
            _tune(transport.get_extra_info("socket"), self.stall_s)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.slot.leave()
        self._clear_deadline()
        self._disconnect_running()

    @property
    def answering(self) -> bool:
        """Whether a request of this connection is being answered."""
        return self._running is not None and not self._running.response_complete

    def evict(self) -> None:
        """Refuse a connection in a spare slot, unless it has its answer, and close it."""
        if self._closing:
            return
        if self._running is None and not self._discarding:
            self._refuse(_no_slot(self.slot.refusal))
            self.transport.close()
        else:
            self.transport.abort()

    def _disconnect_running(self) -> None:
        """Notify the running request that its client has left."""
        cycle = self._running
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    # The deadline -------------------------------------------------------------------------------------------------

    def _set_deadline(self, seconds: float, then: Callable[[], None]) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, then)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _set_idle_deadline(self) -> None:
        """Set the deadline of an idle connection, by the part of a message that it waits for."""
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None  # ours: uvicorn lets bytes cancel it
        if self._in_headers or not self._body_done:
            if timer is not None:
                timer.cancel()
            self._set_deadline(HEADER_S if self._in_headers else REFUSED_BODY_S, self.transport.abort)
        elif timer is not None:
            self._clear_deadline()
            self._deadline = timer
        else:
            self._set_deadline(KEEP_ALIVE_S, self.timeout_keep_alive_handler)

    # Input ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        if self._in_headers or self._body_done:
            self._unparsed_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._bad_request()
            return
        if self._unparsed_bytes > MAX_HEADER_BYTES and (self._in_headers or self._body_done):
            self._oversized = True
            self._bad_request()

    def _parse(self, data: bytes) -> None:
        """Parse input. A request for another protocol, whose body the parser would skip, is answered in this one."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as ended:
                rest = rest[ended.args[0] :]
                self._parse_on()
            else:
                return

    def _parse_on(self) -> None:
        """Replace the parser, which has ended with a head, by one that expects this head's body."""
        callbacks = _FromBodyOn(self)
        self.parser = httptools.HttpRequestParser(callbacks)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        framing = [b"%s: %s\r\n" % line for line in self.headers if line[0] in FRAMING]
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        callbacks.in_head = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[ABORT] = self.transport.abort
        self._field_bytes = self._discarded_bytes = 0
        self._in_headers, self._body_done = True, False
        if self._running is not None and not self.answering:
            self._set_deadline(HEADER_S, self.transport.abort)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_fields(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_fields(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._clear_deadline()
        self._in_headers, self._unparsed_bytes = False, 0
        self._check_codings()
        self._take_authority()
        if self.slot.refusal is not None:
            self._choose_answer(self.slot.refusal)
        super().on_headers_complete()
        if self.flow.read_paused and len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()  # a paused connection would not show a disconnect

        self.cycle.transport = cast("asyncio.Transport", DeferredClose(self.transport, self.close_late))
        if self.slot.refusal is not None:
            self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.0":
            self.cycle.send = Http10Send(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # a premature end: `_parse_on` follows
        super().on_message_complete()
        self._body_done, self._unparsed_bytes = True, 0
        if self._lingering:
            self.transport.close()
        elif not self.answering and not self._closing:
            self._set_idle_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.answering and not self._closing and not self._lingering:
            self._set_idle_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # Refusals -----------------------------------------------------------------------------------------------------

    def _count_fields(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > MAX_HEADER_BYTES:
            self._oversized = True
            raise ValueError("headers too large")  # ends the parsing

    def _check_codings(self) -> None:
        """End the parsing if a body has other transfer codings than chunks: proxies disagree on its end."""
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise ValueError("unknown transfer coding")

    def _take_authority(self) -> None:
        """Replace the Host header by the host of a target in absolute form, which takes precedence (RFC 9112,
        3.2.2)."""
        if self.url.startswith((b"/", b"*")) or b"://" not in self.url:
            return
        target = httptools.parse_url(self.url)
        if target.userinfo:
            raise ValueError("a user in the target")
        host = b"[%s]" % target.host if b":" in target.host else target.host
        positions = [at for at, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(positions) == 1:
            self.headers[positions[0]] = (b"host", host)
        elif not positions:
            self.headers.append((b"host", host))

    def _choose_answer(self, refusal: Refusal) -> None:
        """Let the application refuse what is no probe in a spare slot: the refusal then has the headers of all others,
        and a page's preflight is answered."""
        path = httptools.parse_url(self.url).path
        known = PROBES if self.slot.peer else LOCAL_PROBES
        if self.parser.get_method() not in (b"GET", b"HEAD") or path not in known:
            cast("dict[str, Any]", self.scope)[REFUSAL] = _no_slot(refusal)

    def _bad_request(self) -> None:
        if self._closing:
            return
        if self.answering and self._running is not None and self._running.response_started:
            self.transport.close()  # nothing may be written into another answer
            return
        status, message = 400, "this is not HTTP/1.1 as the server understands it: check the request's first lines"
        if self._oversized:
            status, message = 431, f"the request's headers are over {MAX_HEADER_BYTES} bytes: send less"
        error = InvalidRequest(message)
        self._refuse(error, status, self._log(status, error.code))
        self._disconnect_running()
        self._discarding = True
        self.transport.write_eof()
        self._set_deadline(LINGER_S, self.transport.abort)  # closing now would make the client lose the answer

    def _log(self, status: int, code: str) -> list[tuple[bytes, bytes]]:
        """Log a refusal of the protocol, on the line of the running request, if there is one. Returns the headers that
        name the request."""
        if self.answering and self._running is not None:
            cast("dict[str, Any]", self._running.scope)[PROTOCOL_ERROR] = (status, code)
            return []
        if self.malformed is None:
            return []
        return [(b"x-request-id", self.malformed.write(self.client, status, code).encode())]

    def _refuse(
        self, error: TreadleError, status: int | None = None, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Send an error without a request to answer."""
        body = msgspec.json.encode(error_shape(self._partial_scope())(error))
        retry = b"".join(b"%s: %s\r\n" % line for line in (*headers_of(error), *headers))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(STATUS_LINE[status or error.http_status] + head + retry + b"\r\n" + body)

    def _partial_scope(self) -> dict[str, Any]:
        """Return what is known of the request, which may not be parsed to its end: its path and headers so far."""
        url, headers = getattr(self, "url", None) or b"", getattr(self, "headers", None) or ()
        return {"path": url.partition(b"?")[0].decode("latin-1"), "headers": headers}

    def close_late(self) -> None:
        """Close after the client has sent the body it began: closing earlier would make it lose the answer."""
        if self._body_done:
            self.transport.close()
        elif not self._lingering:
            self._lingering = True
            self.transport.write_eof()
            self._set_deadline(REFUSED_BODY_S, self.transport.abort)

    @property
    def _closing(self) -> bool:
        return bool(self.transport.is_closing())


class _FromBodyOn:
    """Callbacks of a parser that gets the head of a message again: `protocol`'s, without this head's."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        self.in_head = True
        self._protocol = protocol

    def __getattr__(self, name: str) -> Callable[..., None]:
        callback = getattr(self._protocol, name)

        def call(*values: bytes) -> None:
            if not self.in_head or name == "on_message_complete":  # without a body, it comes with the head
                callback(*values)

        return call


def _no_slot(refusal: Refusal | None) -> Busy:
    holder = "your address has" if refusal is Refusal.PEER_CONNECTIONS else "it has"
    return Busy(f"the server is busy: {holder} as many connections as it can hold", retry_after_s=1.0)


def _tune(sock: socket.socket, stall_s: float) -> None:
    """Set a small send buffer, so that a stalled reader is noticed soon, and keep-alive, which ends connections to
    vanished peers."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    unanswered_ms = int(min(1000 * max(stall_s, 2 * PROBE_S), MAX_OPTION))
    for name, value in (("TCP_KEEPIDLE", PROBE_S), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", unanswered_ms)):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
