"""Listening sockets."""

from __future__ import annotations

import socket

from ..errors import ConfigError

LISTEN_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; choose another with `host` and `port`"
        ) from error
    sock.setblocking(False)
    return sock
