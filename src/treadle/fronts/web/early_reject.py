"""Early reject of generation requests on the request line, while none can be admitted: refusals in overload must cost
little (D1). A key over its own limits is refused before the gate is asked, so that it takes no ticket.

Requests that pass still have to reserve slots, once their size is known. A client that returns with a ticket, or with
the same request, gets the slot promised to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.refusals import Refusal
from ...core.virtual_queue import Arrival
from ...errors import RateLimited, TreadleError
from ..authentication import Authenticator, Caller
from .access_log import record_error
from .errors import send_error
from .guard import caller_of


class EarlyReject:
    """Middleware before routing, and before the body is read. `check_room` raises while the engine admits none;
    `arrival_of` identifies the client; `paths` are those that generate. Answers to a key with limits a minute have
    `x-ratelimit-*`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        check_room: Callable[[Arrival], None],
        arrival_of: Callable[[Scope], Arrival],
        paths: Collection[str],
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._check_room = check_room
        self._arrival_of = arrival_of
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            caller = caller_of(scope)
            send = _with_limits(send, caller, self._authenticator)
            try:
                caller.account.check(self._authenticator.clock())
                self._check_room(self._arrival_of(scope))
            except TreadleError as error:
                if isinstance(error, RateLimited):
                    self._authenticator.refused(Refusal.RATE_LIMITED)
                record_error(scope, error.code)
                await send_error(send, error, scope)
                return
        await self._app(scope, receive, send)


def _with_limits(send: Send, caller: Caller, authenticator: Authenticator) -> Send:
    """Wrap `send` to add the `x-ratelimit-*` headers of a key that has such limits."""
    if not caller.account.headers(authenticator.clock()):
        return send

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *caller.account.headers(authenticator.clock())]
        await send(message)

    return send_with_headers
