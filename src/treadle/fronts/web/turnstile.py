"""Refuses a generation request on its first line, where none could come in: refusals in overload must cost little (D1).

What it lets pass still has to reserve its places: only then is its size known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import TreadleError
from .access import note_error
from .errors import send_error


class Turnstile:
    """Before routing, and before the body is read. `check_room` raises where the engine takes nothing; `paths` are
    those that generate."""

    def __init__(self, app: ASGIApp, *, check_room: Callable[[], None], paths: Collection[str]) -> None:
        self._app = app
        self._check_room = check_room
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            try:
                self._check_room()
            except TreadleError as error:
                note_error(scope, error.code)
                await send_error(send, error)
                return
        await self._app(scope, receive, send)
