"""Refuses a generation request on its first line, where none could come in: refusals in overload must cost little (D1).

What it lets pass still has to reserve its places: only then is its size known. Who comes back with a ticket, or as the
same request, finds the place that was kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.line import Arrival
from ...errors import TreadleError
from .access import note_error
from .errors import send_error


class Turnstile:
    """Before routing, and before the body is read. `check_room` raises where the engine takes nothing; `arrival_of`
    says who comes; `paths` are those that generate."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        check_room: Callable[[Arrival], None],
        arrival_of: Callable[[Scope], Arrival],
        paths: Collection[str],
    ) -> None:
        self._app = app
        self._check_room = check_room
        self._arrival_of = arrival_of
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            try:
                self._check_room(self._arrival_of(scope))
            except TreadleError as error:
                note_error(scope, error.code)
                await send_error(send, error)
                return
        await self._app(scope, receive, send)
