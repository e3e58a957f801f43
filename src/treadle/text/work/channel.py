"""Frames on a socket between the server and its child processes, and the start of such a child."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from .messages import HEADER, Message, frame_start


class Channel:
    """Frames on a socket, for one reader and one writer on the event loop. `read` raises EOFError at the end of the
    stream."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def write(self, message: Message, payload: bytes = b"") -> None:
        start = frame_start(message, len(payload))
        if len(payload) < 65536:
            await self._loop.sock_sendall(self.sock, start + payload)
            return
        await self._loop.sock_sendall(self.sock, start)
        await self._loop.sock_sendall(self.sock, payload)

    async def read(self, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, bytes]:
        size, payload_bytes = HEADER.unpack(await self._read_exactly(HEADER.size))
        rest = await self._read_exactly(size + payload_bytes)
        view = memoryview(rest)
        return decoder.decode(view[:size]), bytes(view[size:])

    async def _read_exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = await self._loop.sock_recv_into(self.sock, view[at:])
            if not count:
                raise EOFError
            at += count
        return data

    def close(self) -> None:
        self.sock.close()


async def start_child(module: str, environment: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, Channel]:
    """Start a Python process that runs `module`, and return it with the channel to it. Its arguments are the descriptor
    of its end and this process's id. It has a process group of its own, and no standard streams: its libraries may
    write to them as much as requests make them."""
    ours, theirs = socket.socketpair()
    channel, quiet = Channel(ours), asyncio.subprocess.DEVNULL
    command = (sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()))
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                process_group=0,
                env=environment,
            )
    except BaseException:
        channel.close()
        raise
    return process, channel
