"""One HTTP exchange at a time per connection, with nothing between the socket and the clock that could hold it up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from .errors import BenchError
from .plan import Request
from .samples import Outcome, Sample
from .wire import PATHS, AnswerReader, Endpoint, body_of, error_of

REFUSED = (429, 503)
MAX_ERROR_BYTES = 16 * 1024


@dataclass(frozen=True)
class Answer:
    """What a GET came to. `status` 0: there was no whole answer."""

    status: int
    body: bytes
    took_s: float

    def json(self) -> Any:
        """The body's value, or None where it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class Exchange(asyncio.Protocol):
    """Sends `data` when connected and reads the answer. `over` is set when it has ended, for whatever reason.

    `heard` is called with the number of new pieces. Times are the loop's, in seconds, from `began`.
    """

    def __init__(
        self, data: bytes, reader: AnswerReader, clock: Callable[[], float], heard: Callable[[int], None]
    ) -> None:
        self._data = data
        self._reader = reader
        self._clock = clock
        self._heard = heard
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.began = clock()
        self.changed = self.began
        self.over = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.header_s: float | None = None
        self.piece_s: list[float] = []
        self.body = b""
        self.complete = False
        self.trouble = ""

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self.changed = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.trouble = f"not HTTP: {error}"
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self.trouble:
            self.trouble = "connection reset"
        if self.status and "content-length" not in self.headers and not self._is_chunked():
            self.on_message_complete()
        self.over.set()

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.header_s = self.changed - self.began

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
        """End the connection, whatever state it is in."""
        if self._transport is not None:
            self._transport.abort()
        self.over.set()

    def _count(self, pieces: int) -> None:
        self.piece_s += [self.changed - self.began] * pieces
        if pieces:
            self._heard(pieces)

    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


class Client:
    """Talks to one server. `silence_s` is how long an answer may say nothing at all before it is given up."""

    def __init__(self, url: str, *, api_key: str | None = None, silence_s: float = 120.0) -> None:
        self.host, self.port, path = _parts(url)
        self._base = path.rstrip("/").removesuffix("/v1")
        self._silence_s = silence_s
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def get(self, path: str, timeout_s: float = 10.0) -> Answer:
        """One GET, whatever its status."""
        whole = _Whole()
        exchange = await self._begin(self._head("GET", path).encode(), whole, lambda _: None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await exchange.over.wait()
        exchange.drop()
        took_s = asyncio.get_running_loop().time() - exchange.began
        return Answer(exchange.status if exchange.complete else 0, whole.data or exchange.body, took_s)

    async def send(
        self,
        request: Request,
        sample: Sample,
        leave: asyncio.Event,
        *,
        model: str,
        endpoint: Endpoint,
        extra: dict[str, Any],
        heard: Callable[[int], None],
    ) -> None:
        """One generation; what was seen is written into `sample`. It is left as soon as `leave` is set."""
        body = body_of(request, model, endpoint, extra)
        head = self._head("POST", PATHS[endpoint], f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n")
        reader = AnswerReader(stream=request.stream)
        exchange = await self._begin(head.encode() + body, reader, heard)
        why = await self._until_over(exchange, leave)
        fill(sample, exchange, reader, why)

    async def _begin(self, data: bytes, reader: AnswerReader, heard: Callable[[int], None]) -> Exchange:
        loop = asyncio.get_running_loop()
        exchange = Exchange(data, reader, loop.time, heard)
        try:
            await loop.create_connection(lambda: exchange, self.host, self.port)
        except OSError as error:
            exchange.trouble = f"no connection: {error.strerror or error}"
            exchange.drop()
        return exchange

    async def _until_over(self, exchange: Exchange, leave: asyncio.Event) -> str:
        """Why the exchange ended before its end: "left", "silent", or nothing."""
        left = asyncio.ensure_future(leave.wait())
        over = asyncio.ensure_future(exchange.over.wait())
        try:
            while not over.done():
                quiet = asyncio.get_running_loop().time() - exchange.changed
                if quiet >= self._silence_s:
                    return "silent"
                await asyncio.wait((left, over), timeout=self._silence_s - quiet, return_when=asyncio.FIRST_COMPLETED)
                if left.done() and not over.done():
                    return "left"
            return ""
        finally:
            left.cancel()
            over.cancel()
            exchange.drop()

    def _head(self, method: str, path: str, more: str = "") -> str:
        host = f"{self.host}:{self.port}"
        return f"{method} {self._base}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{self._key}{more}\r\n"


def _parts(url: str) -> tuple[str, int, str]:
    """Host, port and path. Raises BenchError."""
    wrong = BenchError(f"'{url}' is not a URL of the form http://HOST:PORT")
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        raise wrong from None
    if parts.scheme != "http" or not host:
        raise wrong
    return host, port, parts.path


class _Whole(AnswerReader):
    """Keeps a body as it is."""

    def __init__(self) -> None:
        super().__init__(stream=False)
        self.data = b""

    def feed(self, data: bytes) -> int:
        self.data += data
        return 0


def fill(sample: Sample, exchange: Exchange, reader: AnswerReader, why: str) -> None:
    """Write what an exchange came to into its sample. `why`: "left", "silent" or "" for an end of its own."""
    sample.status = exchange.status
    sample.header_s = exchange.header_s
    sample.piece_s = exchange.piece_s
    ended = asyncio.get_running_loop().time() if why and not reader.whole else exchange.changed
    sample.end_s = ended - exchange.began
    sample.prompt_tokens = reader.count("prompt_tokens")
    sample.completion_tokens = reader.count("completion_tokens")
    sample.cached_tokens = reader.count("cached_tokens")
    sample.finish_reason = reader.finish_reason
    sample.retry_after_s = _retry_after(exchange.headers)
    sample.outcome, sample.reason = _judge(exchange, reader, why)


def _judge(exchange: Exchange, reader: AnswerReader, why: str) -> tuple[Outcome, str]:
    if why == "left":
        return "left", ""
    if exchange.status in REFUSED:
        return "refused", f"{exchange.status} {error_of(exchange.body)}"
    if exchange.status == 0:
        return "failed", "no answer in time" if why == "silent" else exchange.trouble or "closed without an answer"
    if exchange.status != 200:
        return "failed", f"{exchange.status} {error_of(exchange.body)}"
    if reader.error:
        return "failed", f"inside a 200: {reader.error}"
    if reader.whole:
        return "ok", ""
    if why == "silent":
        return "incomplete", "fell silent"
    return "incomplete", exchange.trouble or "broke off"


def _retry_after(headers: dict[str, str]) -> float | None:
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
    return None
