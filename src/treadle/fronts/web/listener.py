"""Listener that accepts connections: few at a time, within limits, and with an answer for each one.

A connection beyond the limits takes one of SPARE_SLOTS. There it gets an answer if its request is a probe, else a 503
with Retry-After, and is closed in any case. If the spare slots are taken, the oldest of them that is not just being
answered is evicted; if all are too young for that, the listener pauses for a moment, and the kernel queues new
connections. So a flood costs a bounded number of descriptors and a bounded share of the event loop, and a probe is
answered during it.
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
"""Connections that one wake-up accepts at most, so that other tasks of the event loop get their turn."""
SPARE_SLOTS = 32
MIN_AGE_S = 0.02
"""Time that a connection in a spare slot has to send its request before it can be evicted."""
PAUSE_S = 0.5
LOG_EVERY_S = 1.0


class EvictableConnection(Protocol):
    """A connection's protocol, as the listener uses it."""

    @property
    def answering(self) -> bool:
        """Whether its request is being answered."""
        ...

    def evict(self) -> None:
        """Refuse the request now and close the connection."""
        ...


class ConnectionSlot:
    """Slot of a connection, until it ends. `refusal` is the reason for a spare slot, else None."""

    def __init__(self, listener: Listener, peer: str, refusal: Refusal | None) -> None:
        self.peer = peer
        self.refusal = refusal
        self.since = time.monotonic()
        self.connection: EvictableConnection | None = None
        self._listener: Listener | None = listener

    def leave(self) -> None:
        """Free the slot at the end of the connection. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.left(self)


class Listener:
    """Acceptor on sockets that are already listening, on the running event loop, until closed. It has the part of
    `asyncio.Server` that uvicorn uses."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Callable[[ConnectionSlot], asyncio.Protocol],
        connections: Connections,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._protocol = protocol
        self._connections = connections
        self._spare: dict[ConnectionSlot, None] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._logged_at = -LOG_EVERY_S
        self._closed = False
        for sock in self._sockets:
            sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more. The sockets stay open."""
        if not self._closed:
            self._closed = True
            self._stop_listening()

    async def wait_closed(self) -> None:
        """Wait until the connections that were just accepted have their protocol."""
        if self._joining:
            await asyncio.wait(self._joining)

    def left(self, slot: ConnectionSlot) -> None:
        """Free the slot of a connection that has ended."""
        if slot.refusal is None:
            self._connections.leave(slot.peer)
        else:
            self._spare.pop(slot, None)
            if self._paused is not None and not self._closed:
                self._resume()

    # Listening ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _stop_listening(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())

    def _pause(self, seconds: float) -> None:
        self._stop_listening()
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
                continue  # the client has left the kernel's queue
            except OSError as error:
                self._out_of_descriptors(error)
                return
            self._admit(sock, str(address[0]))

    def _out_of_descriptors(self, error: OSError) -> None:
        """Pause: the listening socket stays readable although nothing can be accepted."""
        self._pause(PAUSE_S)
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning(
                "can't accept HTTP connections (%s): new ones wait %g s; raise the limit of open files (ulimit -n)",
                error.strerror,
                PAUSE_S,
            )

    # Slots --------------------------------------------------------------------------------------------------------

    def _wait_s(self) -> float:
        """Return the seconds until a spare slot is free, should the next connection need one."""
        if len(self._spare) < SPARE_SLOTS:
            return 0.0
        oldest = self._oldest()
        return MIN_AGE_S if oldest is None else max(0.0, oldest.since + MIN_AGE_S - time.monotonic())

    def _oldest(self) -> ConnectionSlot | None:
        """Return the spare slot taken first, of those whose connection is not being answered."""
        for slot in self._spare:
            if slot.connection is None or not slot.connection.answering:
                return slot
        return None

    def _admit(self, sock: socket.socket, host: str) -> None:
        peer = peer_of(host)
        slot = ConnectionSlot(self, peer, self._connections.enter(peer))
        if slot.refusal is not None:
            self._connections.refused(slot.refusal)
            self._take_spare(slot)
        task = self._loop.create_task(self._join(sock, slot), name="treadle-accept")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _take_spare(self, slot: ConnectionSlot) -> None:
        if len(self._spare) >= SPARE_SLOTS and (oldest := self._oldest()) is not None:
            self._spare.pop(oldest)
            if oldest.connection is not None:
                oldest.connection.evict()
        self._spare[slot] = None

    async def _join(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        """Give an accepted socket its protocol."""
        sock.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: self._protocol(slot), sock)
        except BaseException as error:
            slot.leave()
            sock.close()
            if not isinstance(error, Exception):
                raise
            log.debug("a connection ended before it was served", exc_info=True)
