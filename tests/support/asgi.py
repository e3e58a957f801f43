"""Raw ASGI client, which controls when the body comes, when it reads, and at which byte it leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any


class Client:
    """One request. `leave()` disconnects; a cleared `readable` makes every send wait (a reader that stalls)."""

    def __init__(
        self,
        method: str,
        path: str,
        body: bytes | list[bytes] = b"",
        headers: dict[str, str] | None = None,
        *,
        leave_after: int | None = None,
        version: str = "1.1",
    ) -> None:
        self._version = version
        self._method, self._path = method, path
        parts = body if isinstance(body, list) else [body]
        self._parts = [
            {"type": "http.request", "body": p, "more_body": i + 1 < len(parts)} for i, p in enumerate(parts)
        ]
        self._headers = [
            (b"host", b"localhost"),
            *((k.lower().encode(), v.encode()) for k, v in (headers or {}).items()),
        ]
        self._leave_after = leave_after
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self.readable = asyncio.Event()
        self.readable.set()
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.complete = False
        self.aborted = False
        self.task: asyncio.Task[Client] | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of every event, decoded; [DONE] stays a string."""
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [d if d == "[DONE]" else json.loads(d) for d in data]

    def start(self, app: Any) -> Client:
        self.task = asyncio.create_task(self.run(app))
        return self

    async def run(self, app: Any) -> Client:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": self._version,
            "method": self._method,
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": self._headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "treadle.abort": self._abort,
        }
        await app(scope, self._receive, self._send)
        return self

    def leave(self) -> None:
        self._gone.set()

    async def until(self, holds: Callable[[Client], bool]) -> None:
        """Wait until the server's output satisfies `holds`."""
        while not holds(self):
            self._news.clear()
            await self._news.wait()

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return self._parts.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.readable.wait()
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            assert self.status is None, "two responses"
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            assert self.status is not None, "a body without headers"
            self.chunks.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        self._news.set()
        if self._leave_after is not None and len(self.body) >= self._leave_after:
            self.leave()

    def _abort(self) -> None:
        self.aborted = True
        self.leave()


def post(path: str, value: Any, **options: Any) -> Client:
    body = value if isinstance(value, (bytes, list)) else json.dumps(value).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return Client("POST", path, body, headers, **options)


def get(path: str, **options: Any) -> Client:
    return Client("GET", path, **options)
