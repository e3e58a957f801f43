"""Changes to uvicorn's cycle of one request: the close of its connection, and the framing of answers to HTTP/1.0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class DeferredClose:
    """Transport of a request's cycle. `close` is called in place of the transport's own."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.close = close
        self.is_closing = transport.is_closing
        self.write = transport.write


class Http10Send:
    """Replacement of `cycle.send` for an HTTP/1.0 client, which knows no chunks: a body of unknown length ends with the
    connection."""

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
