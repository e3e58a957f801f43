"""Census of the gRPC server's connections: its C core accepts them itself, reports nothing about them to Python and
limits only their total. Connections beyond a peer's share are shut down here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...core.refusals import Refusal
from ..connections import Connections, peer_of

EVERY_S = 1.0
SHARE = 0.02
"""Share of a CPU that scans may take, for any number of descriptors."""
OWN_FILES = next((path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.is_dir()), Path("/dev/fd"))

Client = tuple[str, int]


class ConnectionCensus:
    """Counter of the connections to `port` in `connections`, which ends those beyond a peer's share, the newest first.
    A connection is seen up to EVERY_S after it was accepted."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._known: dict[Client, str] = {}

    async def run(self, port: int) -> None:
        """Scan periodically, until cancelled."""
        while True:
            began = time.monotonic()
            with contextlib.suppress(OSError):  # no descriptor is left: scan later
                await self._scan(port)
            took_s = time.monotonic() - began
            await asyncio.sleep(max(EVERY_S, took_s / SHARE))

    async def _scan(self, port: int) -> None:
        """Count, and end the surplus. Raises OSError if no descriptor is left to scan with."""
        surplus = self.update(await asyncio.to_thread(lambda: list(_clients(port))))
        if surplus:
            await asyncio.to_thread(_shut_down, port, frozenset(surplus))

    def update(self, clients: Iterable[Client]) -> list[Client]:
        """Count `clients`, which are all that are connected now; return the refused ones."""
        now = dict.fromkeys(clients)
        for closed in [client for client in self._known if client not in now]:
            self._connections.leave(self._known.pop(closed))
        return [client for client in now if client not in self._known and not self._enter(client)]

    def _enter(self, client: Client) -> bool:
        peer = peer_of(client[0])
        reason = self._connections.enter(peer)
        if reason is Refusal.PEER_CONNECTIONS:
            self._connections.refused(reason)
            return False
        if reason is None:
            self._known[client] = peer
        return True  # the core itself enforces the total limit


def _clients(port: int) -> Iterator[Client]:
    """Yield the remote ends of this process's TCP connections to `port`."""
    for sock, client in _connected(port):
        sock.close()
        yield client


def _shut_down(port: int, clients: frozenset[Client]) -> None:
    for sock, client in _connected(port):
        with sock:
            if client in clients:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # the core reads an end of file, and closes its descriptor


def _connected(port: int) -> Iterator[tuple[socket.socket, Client]]:
    """Yield those connections, each with a descriptor of its own that the caller closes: the core's may close at any
    time."""
    for name in os.listdir(OWN_FILES):
        sock = _socket_at(int(name))
        if sock is not None:
            client = _client_of(sock, port)
            if client is None:
                sock.close()
            else:
                yield sock, client


def _socket_at(descriptor: int) -> socket.socket | None:
    """Return a duplicate of the descriptor; None if it is no socket."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            copy = os.dup(descriptor)
            try:
                return socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
    return None


def _client_of(sock: socket.socket, port: int) -> Client | None:
    with contextlib.suppress(OSError):
        here = sock.getsockname()
        if isinstance(here, tuple) and here[1] == port:
            there = sock.getpeername()
            return there[0], there[1]
    return None
