"""Small HTTP/1.1 client for load: one connection a request, no library between the socket and the clock."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """One request as the client saw it. Times are seconds from the moment it was sent; `finished`: a stream came to its
    `[DONE]`."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    header_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    total_s: float = 0.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] if self.token_s else float("nan")

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Target:
    host: str
    port: int

    async def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> Reply:
        return await self._request(self._head("GET", path, headers or {}))

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        leave_after: float | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send `body`; with `leave_after`, drop the connection after that many seconds (float) or events (int)."""
        data = json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        return await self._request(self._head("POST", path, all_headers) + data, leave_after)

    def _head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _request(self, data: bytes, leave_after: float | int | None = None) -> Reply:
        reply, began = Reply(), time.perf_counter()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            seconds = leave_after if isinstance(leave_after, float) else None
            events = leave_after if isinstance(leave_after, int) else None
            async with asyncio.timeout(seconds):
                await self._read(reader, reply, began, events)
        except TimeoutError:
            reply.error = "left"
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            reply.error = type(error).__name__
        finally:
            reply.total_s = time.perf_counter() - began
            writer.transport.abort()
        return reply

    async def _read(self, reader: asyncio.StreamReader, reply: Reply, began: float, events: int | None) -> None:
        reply.status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            reply.headers[name.lower()] = value.strip()
        reply.header_s = time.perf_counter() - began
        if "text/event-stream" not in reply.headers.get("content-type", ""):
            reply.body = await reader.read()
            return
        while line := await reader.readline():
            if line.startswith(b"data: "):
                self._event(line[6:].strip(), reply, time.perf_counter() - began)
                if events is not None and len(reply.token_s) >= events:
                    reply.error = "left"
                    return

    @staticmethod
    def _event(data: bytes, reply: Reply, now: float) -> None:
        if data == b"[DONE]":
            reply.finished = True
            return
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            reply.error = str(error.get("code") or "error") if isinstance(error, dict) else "error"
            return
        reply.text += "".join(c.get("text") or "" for c in event["choices"])
        if any(c.get("text") or c.get("token_ids") for c in event["choices"]):
            reply.token_s.append(now)
