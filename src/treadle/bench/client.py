"""HTTP client that sends one request per connection, with nothing between the socket and the clock that could delay
it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httptools
import msgspec
from msgspec import UNSET

from ..host_names import server_of
from .answers import check
from .errors import BenchError
from .plan import Request
from .samples import Outcome, Sample
from .wire import PATHS, AnswerReader, Endpoint, body_of, error_of

REFUSED = (429, 503)
MAX_ERROR_BYTES = 16 * 1024


@dataclass(frozen=True)
class HttpResponse:
    """Result of a GET. `status` 0: no complete response came."""

    status: int
    body: bytes
    took_s: float

    def json(self) -> Any:
        """Return the body's value; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class HttpExchange(asyncio.Protocol):
    """Protocol that sends `data` when connected and reads the response. `ended` is set when it has ended, for any
    reason.

    `on_pieces` is called with the number of new pieces. Times are the loop's, in seconds, from `began`.
    """

    def __init__(
        self, data: bytes, reader: AnswerReader, clock: Callable[[], float], on_pieces: Callable[[int], None]
    ) -> None:
        self._data = data
        self._reader = reader
        self._clock = clock
        self._on_pieces = on_pieces
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.began = clock()
        self.last_data = self.began
        self.ended = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.header_s: float | None = None
        self.piece_s: list[float] = []
        self.body = b""
        self.complete = False
        self.failure = ""

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self.last_data = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failure = f"not HTTP: {error}"
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self.failure:
            self.failure = "connection reset"
        if self.status and "content-length" not in self.headers and not self._is_chunked():
            self.on_message_complete()
        self.ended.set()

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.header_s = self.last_data - self.began

    def on_body(self, data: bytes) -> None:
        if self.status != 200:
            self.body = (self.body + data)[:MAX_ERROR_BYTES]
            return
        self._count(self._reader.feed(data))

    def on_message_complete(self) -> None:
        if self.complete:
            return
        self.complete = True
        if self.status == 200:
            before = self._reader.pieces
            self._reader.end()
            self._count(self._reader.pieces - before)
        self.drop()

    def drop(self) -> None:
        """End the connection, in any state."""
        if self._transport is not None:
            self._transport.abort()
        self.ended.set()

    def _count(self, pieces: int) -> None:
        self.piece_s += [self.last_data - self.began] * pieces
        if pieces:
            self._on_pieces(pieces)

    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


class Client:
    """Client of one server. An answer is given up after `silence_s` seconds without a byte."""

    def __init__(self, url: str, *, api_key: str | None = None, silence_s: float = 120.0) -> None:
        self.host, self.port, path = _parts(url)
        self._base = path.rstrip("/").removesuffix("/v1")
        self._silence_s = silence_s
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def get(self, path: str, timeout_s: float = 10.0) -> HttpResponse:
        """Send a GET and return the response, of any status."""
        whole = _BodyReader()
        exchange = await self._begin(self._head("GET", path).encode(), whole, lambda _: None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await exchange.ended.wait()
        exchange.drop()
        took_s = asyncio.get_running_loop().time() - exchange.began
        return HttpResponse(exchange.status if exchange.complete else 0, whole.data or exchange.body, took_s)

    async def send(
        self,
        request: Request,
        sample: Sample,
        leave: asyncio.Event,
        *,
        model: str,
        endpoint: Endpoint,
        extra: dict[str, Any],
        on_pieces: Callable[[int], None],
    ) -> None:
        """Send one generation request and record it in `sample`. Leaves as soon as `leave` is set."""
        body = body_of(request, model, endpoint, extra)
        head = self._head("POST", PATHS[endpoint], f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n")
        reader = AnswerReader(stream=request.stream)
        exchange = await self._begin(head.encode() + body, reader, on_pieces)
        early_end = await self._until_ended(exchange, leave)
        fill(sample, exchange, reader, early_end)
        if request.fields is not UNSET:
            sample.checked, sample.valid = check(request.fields, reader)

    async def _begin(self, data: bytes, reader: AnswerReader, on_pieces: Callable[[int], None]) -> HttpExchange:
        loop = asyncio.get_running_loop()
        exchange = HttpExchange(data, reader, loop.time, on_pieces)
        try:
            await loop.create_connection(lambda: exchange, self.host, self.port)
        except OSError as error:
            exchange.failure = f"no connection: {error.strerror or error}"
            exchange.drop()
        return exchange

    async def _until_ended(self, exchange: HttpExchange, leave: asyncio.Event) -> str:
        """Wait for the end of the exchange. Returns the reason of an early end, "left" or "silent", or ""."""
        left = asyncio.ensure_future(leave.wait())
        end = asyncio.ensure_future(exchange.ended.wait())
        try:
            while not end.done():
                quiet = asyncio.get_running_loop().time() - exchange.last_data
                if quiet >= self._silence_s:
                    return "silent"
                await asyncio.wait((left, end), timeout=self._silence_s - quiet, return_when=asyncio.FIRST_COMPLETED)
                if left.done() and not end.done():
                    return "left"
            return ""
        finally:
            left.cancel()
            end.cancel()
            exchange.drop()

    def _head(self, method: str, path: str, headers: str = "") -> str:
        host = f"{self.host}:{self.port}"
        return f"{method} {self._base}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{self._key}{headers}\r\n"


def _parts(url: str) -> tuple[str, int, str]:
    """Split a URL into host, port and path. Raises BenchError."""
    parts = server_of(url, ("http",))
    if parts is None or parts.hostname is None:
        raise BenchError(f"'{url}' is not a URL of the form http://HOST:PORT")
    return parts.hostname, parts.port or 80, parts.path


class _BodyReader(AnswerReader):
    """Reader that collects a body unparsed."""

    def __init__(self) -> None:
        super().__init__(stream=False)
        self.data = b""

    def feed(self, data: bytes) -> int:
        self.data += data
        return 0


def fill(sample: Sample, exchange: HttpExchange, reader: AnswerReader, early_end: str) -> None:
    """Record an exchange in its sample. `early_end`: "left", "silent", or "" for an end by the server."""
    sample.status = exchange.status
    sample.header_s = exchange.header_s
    sample.piece_s = exchange.piece_s
    ended = asyncio.get_running_loop().time() if early_end and not reader.whole else exchange.last_data
    sample.end_s = ended - exchange.began
    sample.prompt_tokens = reader.count("prompt_tokens")
    sample.completion_tokens = reader.count("completion_tokens")
    sample.cached_tokens = reader.count("cached_tokens")
    sample.finish_reason = reader.finish_reason
    sample.retry_after_s = _retry_after(exchange.headers)
    sample.outcome, sample.reason = _judge(exchange, reader, early_end)


def _judge(exchange: HttpExchange, reader: AnswerReader, early_end: str) -> tuple[Outcome, str]:
    if early_end == "left":
        return "left", ""
    if exchange.status in REFUSED:
        return "refused", f"{exchange.status} {error_of(exchange.body)}"
    if exchange.status == 0:
        return (
            "failed",
            "no answer in time" if early_end == "silent" else exchange.failure or "closed without an answer",
        )
    if exchange.status != 200:
        return "failed", f"{exchange.status} {error_of(exchange.body)}"
    if reader.error:
        return "failed", f"inside a 200: {reader.error}"
    if reader.whole:
        return "ok", ""
    if early_end == "silent":
        return "incomplete", "fell silent"
    return "incomplete", exchange.failure or "broke off"


def _retry_after(headers: dict[str, str]) -> float | None:
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
    return None
