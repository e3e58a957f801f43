"""Cross-origin resource sharing: origins whose pages may call the server, and the headers for their browsers. No answer
ever allows credentials: clients authenticate with a header, never with a cookie."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...host_names import ANY, origin_of

METHODS = b"GET, HEAD, POST, DELETE"
MAX_AGE_S = 600
LIMITS = b", ".join(
    b"x-ratelimit-%s-%s" % (value, of)
    for of in (b"requests", b"tokens")
    for value in (b"limit", b"remaining", b"reset")
)
EXPOSE = (
    b"access-control-expose-headers",
    b"x-request-id, request-id, retry-after, retry-after-ms, x-treadle-ticket, " + LIMITS,
)
TOKENS = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")
MAX_REQUESTED_CHARS = 4096
VARY = (b"vary", b"Origin")

Headers = list[tuple[bytes, bytes]]


class Origins:
    """Origins whose pages may call the server and read its answers, as `--cors-origin` names them."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._any = ANY in allowed
        self._allowed = frozenset(map(origin_of, allowed)) - {None}

    def __contains__(self, origin: str) -> bool:
        return self._any or origin in self._allowed

    def headers(self, origin: str) -> Headers:
        """Return the headers of an answer to a page of `origin`; "" if the request names none."""
        if self._any:
            return [(b"access-control-allow-origin", b"*"), EXPOSE] if origin else []
        if origin not in self._allowed:
            return [VARY] if self._allowed else []
        return [VARY, (b"access-control-allow-origin", origin.encode("latin-1")), EXPOSE]


class Cors:
    """Middleware that adds `origins`' headers to every answer: errors, refusals and streams too, so that a page can
    read them."""

    def __init__(self, app: ASGIApp, *, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._origins.headers(origin_in(scope)) if scope["type"] == "http" else []

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_headers if headers else send)


def origin_in(scope: Scope) -> str:
    """Return the request's Origin header; "" if it has none."""
    return (header_of(scope, b"origin") or b"").decode("latin-1")


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page may send a request; it never sends a key with this question."""
    asks = header_of(scope, b"access-control-request-method") is not None
    return bool(scope["method"] == "OPTIONS" and asks and origin_in(scope))


async def send_permission(scope: Scope, send: Send) -> None:
    """Answer a preflight of an allowed origin. `Cors` adds the origin."""
    headers = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
    ]
    requested = header_of(scope, b"access-control-request-headers")
    if requested is not None and len(requested) <= MAX_REQUESTED_CHARS and TOKENS.fullmatch(requested):
        headers.append((b"access-control-allow-headers", requested))
    if header_of(scope, b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """Return the first value of a header; None if the request has none."""
    return next((value.strip() for key, value in scope["headers"] if key == name), None)
