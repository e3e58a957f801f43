"""HTTP server on sockets that are already listening: uvicorn, with our listener, protocol and limits, and without its
signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any, cast

import uvicorn

from ..connections import Connections
from .access_log import MalformedLog
from .listener import ConnectionSlot, Listener
from .protocol import KEEP_ALIVE_S, GuardedProtocol


class WebServer:
    """Server of one application, until stopped. The sockets stay open until then, also while the server drains."""

    def __init__(
        self,
        app: Any,
        *,
        stall_s: float = 30.0,
        connections: Connections | None = None,
        malformed: MalformedLog | None = None,
    ) -> None:
        """`connections` counts and limits the clients; without it there is no limit. `malformed` logs requests that are
        not HTTP."""
        logging.getLogger("asyncio").addFilter(_is_not_failed_send)
        logging.getLogger("uvicorn.error").addFilter(_is_not_cut_off)
        config = uvicorn.Config(
            app,
            http=type("Protocol", (GuardedProtocol,), {"stall_s": stall_s, "malformed": malformed}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Uvicorn(config, connections or Connections())

    @property
    def started(self) -> bool:
        """Whether the sockets are being listened to."""
        return self._server.started

    @property
    def connections(self) -> int:
        """Connections open now, those in spare slots included."""
        return len(self._server.server_state.connections)

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on `sockets`; returns after `stop`, with all connections ended and the sockets closed."""
        await self._server.serve(sockets=list(sockets))

    def stop(self, grace_s: float = 1.0) -> None:
        """Close the listener, let open requests end for up to `grace_s` seconds, then end them."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True


def _is_not_failed_send(record: logging.LogRecord) -> bool:
    """Whether it is another line than the one that asyncio logs for each write to a connection whose client has just
    left. A check before each write would cost every token."""
    return record.msg != "socket.send() raised exception."


def _is_not_cut_off(record: logging.LogRecord) -> bool:
    """Whether it is another line than uvicorn's about requests that it cuts off at the end of the grace, one traceback
    each: the access log has a line of each."""
    cut = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cut and "graceful shutdown exceeded" not in record.msg


class _Uvicorn(uvicorn.Server):
    """uvicorn's server with our listener."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = [cast("Any", Listener(sockets or (), self._protocol, self._connections))]
        self.started = True

    def _protocol(self, slot: ConnectionSlot) -> asyncio.Protocol:
        make = cast("type[GuardedProtocol]", self.config.http_protocol_class)
        protocol = make(config=self.config, server_state=self.server_state, app_state={})
        protocol.slot = slot
        return protocol
