"""S2: access of other sites' pages to a server with its default options."""

from __future__ import annotations

import asyncio
import json

from .figures import Figure
from .server import Server

SIMPLE, OWN = (
    "text/plain",
    "application/json",
)  # type that a browser sends to other sites without a preflight; and to its own
PAGES = {
    "a page of another site": ("127.0.0.1", "https://evil.example", SIMPLE),
    "a page without an origin": ("127.0.0.1", "null", SIMPLE),
    "a name that was rebound": ("evil.example", "http://evil.example", OWN),
    "a name without dots": ("evilhost", "http://evilhost", OWN),
}
WITHIN_S = 30.0


async def browser(server: Server) -> list[Figure]:
    """Send a completion from each kind of page, with a request that browsers send without a preflight."""
    figures = []
    for label, page in PAGES.items():
        status, cors = await as_page(server, *page)
        value = f"{status or 'closed'}" + (", and may read the answer" if cors else "")
        figures.append(Figure(f"{label} asks for a completion", value, status != 200 and not cors))
    return figures


async def as_page(server: Server, host: str, origin: str, kind: str) -> tuple[int, bool]:
    """Return the status of a page's request, and whether it may read the answer."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nContent-Type: {kind}\r\n"
    body = json.dumps({"model": server.model, "prompt": "hi", "max_tokens": 1}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), WITHIN_S)
    writer.close()
    top = answer.partition(b"\r\n\r\n")[0].lower()
    return int(answer.split()[1]) if answer else 0, b"access-control-allow-origin" in top
