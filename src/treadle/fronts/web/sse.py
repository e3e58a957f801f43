"""Responses in raw ASGI, with control over headers, chunks, pauses and the end.

`AsgiResponse` is the response object a route returns; the whole request is handled inside it. `while_connected` runs
work until the client leaves, even if the work is blocked. `EventStream` writes a stream of events: a client that reads
gets something at least every `keepalive_s`, and one that does not read is dropped after `stall_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...errors import ReaderStalled
from .errors import ClientLeft
from .framing import SERVER_SENT_EVENTS, Framing

ABORT = "treadle.abort"


class AsgiResponse(Response):
    """Response that is a complete ASGI application."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


async def while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work` to its end. Raises its exception, or ClientLeft once it has unwound after the client left.

    The request's body must have been read: the next message is the disconnect.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        left = not working.done()
        await _end(working)
    finally:
        await _end(working, watching)
    if left and working.cancelled():
        raise ClientLeft("the client left")
    working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancel the tasks and return when they have really unwound, even if this task is cancelled meanwhile."""
    interrupted: asyncio.CancelledError | None = None
    for task in tasks:
        task.cancel()
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


class EventStream:
    """A stream of events to one client. `write` may be called by several tasks: each event is sent whole, in the order
    of the calls.

    `on_stall` is called as soon as the client is found not to read, before its connection is `dropped`.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        *,
        keepalive_s: float,
        stall_s: float,
        on_stall: Callable[[], None],
        framing: Framing = SERVER_SENT_EVENTS,
    ) -> None:
        self._scope = scope
        self._send = send
        self._keepalive_s = keepalive_s
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._framing = framing
        self._quiet_since = 0.0
        self._sending = asyncio.Lock()
        self.opened = False
        self.dropped = False

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Send the headers, then keep the stream alive within the block. A stall ends the block with ReaderStalled."""
        self.opened = True
        await self._timed({"type": "http.response.start", "status": 200, "headers": self._framing.headers})
        self._quiet_since = asyncio.get_running_loop().time()
        block = asyncio.current_task()
        assert block is not None
        active = True

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None and active:
                block.cancel()

        pulse = asyncio.create_task(self._pulse())
        pulse.add_done_callback(ended)
        try:
            yield
        except asyncio.CancelledError:
            if pulse.done() and not pulse.cancelled() and block.uncancel() == 0:
                pulse.result()
            raise
        finally:
            active = False
            await _end(pulse)

    async def write(self, events: bytes) -> None:
        """Send whole events. Raises ReaderStalled if the client does not read for `stall_s`."""
        async with self._sending:
            await self._timed({"type": "http.response.body", "body": events, "more_body": True})
        self._quiet_since = asyncio.get_running_loop().time()

    async def end(self, events: bytes) -> None:
        """End the stream with the last `events`, good or bad."""
        await self._timed({"type": "http.response.body", "body": events, "more_body": False})

    async def _timed(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            self._on_stall()
            self.dropped = True
            self._abort()
            raise ReaderStalled(f"the client has not read for {self._stall_s:g} s") from None

    def _abort(self) -> None:
        """Drop the connection with the data buffered for it."""
        abort = self._scope.get(ABORT)
        if abort is not None:
            abort()

    async def _pulse(self) -> None:
        """Keep the stream alive until cancelled, or until the client is found not to read."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._quiet_since + self._keepalive_s - loop.time()))
            if loop.time() >= self._quiet_since + self._keepalive_s:
                await self.write(self._framing.keep_alive)
