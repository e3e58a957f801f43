"""Accepting connections: few at a time, none that cannot be served, and still an answer for everyone.

Beyond the limits a connection takes one of SPARE_PLACES. There it gets an answer if its request is a probe, else a 503
with Retry-After, and is closed in any case. Where the places are taken, the oldest of them that is not just being
answered makes room; where all are too young for that, nobody reads the listener for a moment, and the kernel keeps
newcomers in its queue. So a flood costs a bounded number of descriptors and a bounded share of the event loop, and a
probe is answered through it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ...core.refusals import Refusal
from ..connections import Connections, peer_of

log = logging.getLogger(__name__)

ACCEPTS = 32
"""Connections that one wake-up accepts at most, before everything else on the event loop has its turn."""
SPARE_PLACES = 32
YOUNG_S = 0.02
"""How long a connection in a spare place may take to send its request before others may push it out."""
PAUSE_S = 0.5
TELL_EVERY_S = 1.0


class Visitor(Protocol):
    """A connection's protocol, as the listener sees it."""

    @property
    def answering(self) -> bool:
        """Its request is being answered."""
        ...

    def push_out(self) -> None:
        """Refuse it now and close it."""
        ...


class Place:
    """Where a connection is counted until it ends. `refusal` is set for one in a spare place, and says why."""

    def __init__(self, listener: Listener, peer: str, refusal: Refusal | None) -> None:
        self.peer = peer
        self.refusal = refusal
        self.since = time.monotonic()
        self.visitor: Visitor | None = None
        self._listener: Listener | None = listener

    def leave(self) -> None:
        """The connection has ended. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.left(self)


class Listener:
    """Accepts from sockets that are already listening, on the running event loop, until closed. It has the part of
    `asyncio.Server` that uvicorn uses."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Callable[[Place], asyncio.Protocol],
        connections: Connections,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._protocol = protocol
        self._connections = connections
        self._spare: dict[Place, None] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._told = -TELL_EVERY_S
        self._closed = False
        for sock in self._sockets:
            sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more. The sockets stay open."""
        if not self._closed:
            self._closed = True
            self._deafen()

    async def wait_closed(self) -> None:
        """Returns when the connections that were just accepted have their protocol."""
        if self._joining:
            await asyncio.wait(self._joining)

    def left(self, place: Place) -> None:
        """A connection has ended: the next one may have its place."""
        if place.refusal is None:
            self._connections.leave(place.peer)
        else:
            self._spare.pop(place, None)
            if self._paused is not None and not self._closed:
                self._resume()

    # Listening ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _deafen(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())

    def _pause(self, seconds: float) -> None:
        self._deafen()
        self._paused = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        self._listen()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS):
            wait_s = self._wait_s()
            if wait_s > 0:
                self._pause(wait_s)
                return
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has left the queue
            except OSError as error:
                self._out_of_descriptors(error)
                return
            self._admit(sock, str(address[0]))

    def _out_of_descriptors(self, error: OSError) -> None:
        """The listener stays ready while nothing can be accepted: look away for a while."""
        self._pause(PAUSE_S)
        now = time.monotonic()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            log.warning(
                "can't accept HTTP connections (%s): new ones wait %g s; raise the limit of open files (ulimit -n)",
                error.strerror,
                PAUSE_S,
            )

    # Places -------------------------------------------------------------------------------------------------------

    def _wait_s(self) -> float:
        """Seconds until a spare place can be had, should the next connection need one."""
        if len(self._spare) < SPARE_PLACES:
            return 0.0
        oldest = self._oldest()
        return YOUNG_S if oldest is None else max(0.0, oldest.since + YOUNG_S - time.monotonic())

    def _oldest(self) -> Place | None:
        """The connection in a spare place that came first, of those that are not being answered."""
        for place in self._spare:
            if place.visitor is None or not place.visitor.answering:
                return place
        return None

    def _admit(self, sock: socket.socket, host: str) -> None:
        peer = peer_of(host)
        place = Place(self, peer, self._connections.enter(peer))
        if place.refusal is not None:
            self._connections.refused(place.refusal)
            self._take_spare(place)
        task = self._loop.create_task(self._join(sock, place), name="treadle-accept")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _take_spare(self, place: Place) -> None:
        if len(self._spare) >= SPARE_PLACES and (oldest := self._oldest()) is not None:
            self._spare.pop(oldest)
            if oldest.visitor is not None:
                oldest.visitor.push_out()
        self._spare[place] = None

    async def _join(self, sock: socket.socket, place: Place) -> None:
        """Give an accepted socket its protocol."""
        sock.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: self._protocol(place), sock)
        except BaseException as error:
            place.leave()
            sock.close()
            if not isinstance(error, Exception):
                raise
            log.debug("a connection ended before it was served", exc_info=True)
