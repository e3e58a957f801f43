"""HTTP/1.1 client on a raw socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from .engine import RAISES
from .plan import Manner, Request

LINGER_0 = struct.pack("ii", 1, 0)
SMALL_BUFFER = 2048
PIECE = 256  # bytes at a time of a slow reader
DISCONNECTED = (ConnectionError, asyncio.IncompleteReadError, OSError)


@dataclass(frozen=True)
class Door:
    """Address of the HTTP server, and the key that it requires."""

    port: int
    key: str | None = None
    host: str = "127.0.0.1"

    def request(self, path: str, body: bytes | None, *, close: bool, key: str | None = None) -> bytes:
        """Return the bytes of a request; a GET without a body."""
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        if (key or self.key) is not None:
            lines.append(f"Authorization: Bearer {key or self.key}")
        if close:
            lines.append("Connection: close")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")

    def of(self, request: Request, number: int = 0, *, close: bool = True) -> bytes:
        """Return the bytes of one of the recipes of a planned request."""
        recipe = request.recipes[number]
        path, body = recipe.http(stream=request.stream, salt=request.salt, priority=request.priority)
        if request.manner is Manner.TOO_LONG:
            body["prompt" if "prompt" in body else "messages"] = _too_long(body)
        if request.manner is Manner.RAISES:
            path, body = "/v1/completions", {"prompt": [*RAISES, *recipe.ids], "stream": request.stream}
        return self.request(path, json.dumps(body).encode(), close=close)

    async def open(self, *, slow: bool = False) -> Connection:
        """Connect. Raises OSError."""
        sock = socket.socket()
        sock.setblocking(False)
        if slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=4 * PIECE if slow else 1 << 16)
        except BaseException:
            sock.close()
            raise
        return Connection(sock, reader, writer)

    async def get(self, path: str, within_s: float = 10.0) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises OSError or TimeoutError."""
        async with asyncio.timeout(within_s):
            connection = await self.open()
            try:
                connection.writer.write(self.request(path, None, close=True))
                status, headers = await connection.head()
                body = b"".join([part async for part in connection.body(headers)])
                return status, body
            finally:
                connection.fin()

    async def post(self, path: str, body: Any, within_s: float = 10.0) -> tuple[int, bytes]:
        """Return status and body of a POST. Raises OSError or TimeoutError."""
        async with asyncio.timeout(within_s):
            connection = await self.open()
            try:
                connection.writer.write(self.request(path, json.dumps(body).encode(), close=True))
                status, headers = await connection.head()
                return status, b"".join([part async for part in connection.body(headers)])
            finally:
                connection.fin()


def _too_long(body: dict[str, Any]) -> Any:
    text = "x" * 5000
    return text if "prompt" in body else [{"role": "user", "content": text}]


class Connection:
    """One connection, read explicitly."""

    def __init__(self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sock = sock
        self.reader = reader
        self.writer = writer

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers of the next response. Raises IncompleteReadError if there is none."""
        line = await self.reader.readuntil(b"\n")
        headers: dict[str, str] = {}
        while (header := await self.reader.readuntil(b"\n")) != b"\r\n":
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers

    async def body(self, headers: dict[str, str], pause_s: float = 0.0) -> AsyncIterator[bytes]:
        """Yield the response's body, in parts; raises IncompleteReadError if it is cut."""
        if headers.get("transfer-encoding", "") != "chunked":
            async for part in self._exactly(int(headers.get("content-length", "0")), pause_s):
                yield part
            return
        while size := int(await self.reader.readuntil(b"\n"), 16):
            async for part in self._exactly(size, pause_s):
                yield part
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def _exactly(self, size: int, pause_s: float) -> AsyncIterator[bytes]:
        while size:
            part = await self.reader.read(min(size, PIECE if pause_s else size))
            if not part:
                raise asyncio.IncompleteReadError(b"", size)
            size -= len(part)
            yield part
            if pause_s:
                await asyncio.sleep(pause_s)

    async def rest(self) -> int:
        """Return 1 if a byte comes before the server closes, within a moment; else 0."""
        with contextlib.suppress(TimeoutError, *DISCONNECTED):
            async with asyncio.timeout(2.0):
                return len(await self.reader.read(1))
        return 0

    def rst(self) -> None:
        """Close with a reset."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        self.writer.transport.abort()

    def fin(self) -> None:
        """Close in order."""
        self.writer.close()
