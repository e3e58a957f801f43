"""Outermost middleware: gives each request an id, counts and times it, and writes its access line."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import ServerStopping
from ...telemetry.access_log import UNPARSED, AccessLogWriter, RequestRecord, address
from ...telemetry.metrics import Metrics
from .dialects import is_anthropic

RECORD = "treadle.record"
PROTOCOL_ERROR = "treadle.protocol_error"
OTHER = "other"  # the route of paths that do not exist
CLIENT_REQUEST_ID = b"x-client-request-id"  # OpenAI's SDKs
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
CLIENT_LEFT_STATUS = 499


class RouteTemplates:
    """Templates of the paths of `routes`, such as `/v1/responses/{response_id}`, by which requests are counted. The
    path alone decides: a refusal before the routing counts for its route too."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        known = {route.path_format: route for route in routes if isinstance(route, Route)}
        self._plain = frozenset(name for name, route in known.items() if not route.param_convertors)
        self._open = [(route.path_regex, name) for name, route in known.items() if route.param_convertors]

    def of(self, path: str) -> str:
        """Return the template of a path; OTHER for one that does not exist."""
        if path in self._plain:
            return path
        return next((name for pattern, name in self._open if pattern.match(path)), OTHER)


class AccessLog:
    """Middleware that echoes `x-request-id`, or makes one; Anthropic's clients get it as `request-id` too.

    Handlers find the request's record in `scope[RECORD]`. The protocol leaves the status and the code of its own answer
    to a running request in `scope[PROTOCOL_ERROR]`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        lines: AccessLogWriter,
        routes: RouteTemplates,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._lines = lines
        self._routes = routes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        ids = _given_ids(scope)
        record = scope[RECORD] = RequestRecord(
            id=ids.get(b"x-request-id") or _new_id(),
            method=scope["method"],
            path=scope["path"],
            started=self._clock(),
            client=address(*client) if client else "",
            client_request=ids.get(CLIENT_REQUEST_ID, ""),
        )

        id_headers = (b"x-request-id", b"request-id") if is_anthropic(scope) else (b"x-request-id",)

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *((name, record.id.encode()) for name in id_headers)]
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except asyncio.CancelledError:  # the server's stop cancels requests that do not end by themselves
            record_error(scope, ServerStopping.code)
            raise
        finally:
            record.status, record.error = scope.get(PROTOCOL_ERROR, (record.status, record.error))
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        now = self._clock()
        record.status = record.status or CLIENT_LEFT_STATUS
        self._metrics.http(self._routes.of(record.path), record.status, now - record.started)
        self._lines.write(record, now)


class MalformedLog:
    """Log of the requests that the protocol refuses because they are not HTTP: counts them, and writes their access
    lines."""

    def __init__(self, metrics: Metrics, lines: AccessLogWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._lines = lines
        self._clock = clock

    def write(self, client: tuple[str, int] | None, status: int, code: str) -> str:
        """Write the line of a refused request; return its id."""
        now = self._clock()
        where = address(*client) if client else ""
        record = RequestRecord(_new_id(), UNPARSED, UNPARSED, now, where, status, error=code)
        self._metrics.http(OTHER, status, 0.0)
        self._lines.write(record, now)
        return record.id


def record_of(scope: Scope) -> RequestRecord:
    """Return the access log's record of this request."""
    record = scope[RECORD]
    assert isinstance(record, RequestRecord)
    return record


def request_id_of(scope: Scope) -> str | None:
    """Return the id of a request; None before it has one."""
    record = scope.get(RECORD)
    return record.id if isinstance(record, RequestRecord) else None


def record_error(scope: Scope, code: str) -> None:
    """Record the code of a failure for the access line; the first one counts, as the cause."""
    record = scope.get(RECORD)
    if isinstance(record, RequestRecord):
        record.error = record.error or code


def record_key(scope: Scope, key: str) -> None:
    """Record the name of the request's API key for the access line."""
    record = scope.get(RECORD)
    if isinstance(record, RequestRecord):
        record.key = key


def _given_ids(scope: Scope) -> dict[bytes, str]:
    """Return the client's ids of the request by header, where they are well-formed."""
    return {
        name: value.decode("ascii")
        for name, value in scope["headers"]
        if name in (b"x-request-id", CLIENT_REQUEST_ID) and REQUEST_ID.fullmatch(value)
    }


def _new_id() -> str:
    return f"req-{secrets.token_hex(12)}"
