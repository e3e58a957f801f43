"""Errors as responses: with a truthful status, in the shape of the dialect that the request speaks."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import InvalidRequest, NotAuthenticated, RequestCancelled, TreadleError
from ..tenants import TICKET
from .access_log import record_error, request_id_of
from .content_coding import CODINGS, UnsupportedCoding
from .dialects import is_anthropic
from .error_shapes import ErrorShape, anthropic_error, ollama_error, openai_error

log = logging.getLogger(__name__)

JSON = b"application/json"
DEFAULT_RETRY_S = 1.0


class RouteNotFound(InvalidRequest):
    """Unknown path."""

    code = "not_found"
    http_status = 404
    grpc_status = "UNIMPLEMENTED"


class MethodNotAllowed(InvalidRequest):
    """The path exists, with another method."""

    code = "method_not_allowed"
    http_status = 405
    grpc_status = "UNIMPLEMENTED"


class ForeignSite(InvalidRequest):
    """A browser sent this on behalf of a site that is not this server."""

    code = "foreign_site"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class BodyTimeout(InvalidRequest):
    """The request's body came too slowly, or not at all."""

    code = "request_timeout"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class ClientLeft(RequestCancelled):
    """The client closed its connection: no answer can reach it."""

    code = "client_left"


def headers_of(error: TreadleError) -> list[tuple[bytes, bytes]]:
    """Return Retry-After (whole seconds, at least 1), retry-after-ms and the ticket, if a retry can help; the header
    that stops the official SDKs' retries; a 401's challenge; the codings that a 415 asks for."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retryable:
        wait_s = DEFAULT_RETRY_S if error.retry_after_s is None else max(0.0, error.retry_after_s)
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(wait_s * 1000))))
    if error.harmful:
        headers.append((b"x-should-retry", b"false"))
    if error.ticket:
        headers.append((TICKET.encode(), error.ticket.encode()))
    if isinstance(error, NotAuthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, UnsupportedCoding):
        headers.append((b"accept-encoding", ", ".join(CODINGS).encode()))
    return headers


def internal_error() -> TreadleError:
    """Return the error that hides our own bugs from clients."""
    return TreadleError("internal error: the request failed and nothing else did; the server's log says why")


async def send_json(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None, content_type: bytes = JSON
) -> None:
    """Send one complete response."""
    lines = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: TreadleError, scope: Scope, headers: Mapping[str, str] | None = None) -> None:
    """Send the error as a complete response to the request of `scope`, in its dialect's shape."""
    extra = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]
    await send_json(
        send, error.http_status, msgspec.json.encode(error_shape(scope)(error)), [*headers_of(error), *extra]
    )


class ErrorEnvelope:
    """Middleware, outermost but for two: unhandled errors become responses; our own bugs are logged, once, and
    hidden."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except TreadleError as error:
            record_error(scope, error.code)
            if not started and not isinstance(error, ClientLeft):
                await send_error(send, error, scope)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            record_error(scope, TreadleError.code)
            if not started:
                await send_error(send, internal_error(), scope)


BY_PREFIX: Mapping[str, ErrorShape] = {"/api/": ollama_error}
"""Shapes of the paths that begin so; all others have OpenAI's, or Anthropic's where `dialects` finds that."""


def error_shape(scope: Scope) -> ErrorShape:
    """Return the shape of errors of the dialect that a request speaks."""
    if is_anthropic(scope):
        return functools.partial(anthropic_error, request_id=request_id_of(scope))
    path = scope.get("path", "")
    return next((shape for prefix, shape in BY_PREFIX.items() if path.startswith(prefix)), openai_error)
