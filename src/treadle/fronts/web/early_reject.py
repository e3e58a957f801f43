"""Refuses a generation request on its first line, where none could come in: refusals in overload must cost little (D1).
A key over its own limits is refused before the gate is asked, so that it takes no place in line.

What it lets pass still has to reserve its places: only then is its size known. Who comes back with a ticket, or as the
same request, finds the place that was kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.refusals import Refusal
from ...core.virtual_queue import Arrival
from ...errors import RateLimited, TreadleError
from ..authentication import Authenticator, Caller
from .access import note_error
from .errors import send_error
from .guard import caller_of


class EarlyReject:
    """Before routing, and before the body is read. `check_room` raises where the engine takes nothing; `arrival_of`
    says who comes; `paths` are those that generate. Answers to a key with limits a minute have `x-ratelimit-*`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        door: Authenticator,
        check_room: Callable[[Arrival], None],
        arrival_of: Callable[[Scope], Arrival],
        paths: Collection[str],
    ) -> None:
        self._app = app
        self._door = door
        self._check_room = check_room
        self._arrival_of = arrival_of
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            caller = caller_of(scope)
            send = _with_limits(send, caller, self._door)
            try:
                caller.account.check(self._door.clock())
                self._check_room(self._arrival_of(scope))
            except TreadleError as error:
                if isinstance(error, RateLimited):
                    self._door.refused(Refusal.RATE_LIMITED)
                note_error(scope, error.code)
                await send_error(send, error)
                return
        await self._app(scope, receive, send)


def _with_limits(send: Send, caller: Caller, door: Authenticator) -> Send:
    """`send`, with the `x-ratelimit-*` headers of a key that has such limits."""
    if not caller.account.headers(door.clock()):
        return send

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *caller.account.headers(door.clock())]
        await send(message)

    return told
