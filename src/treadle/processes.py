"""Other programs that this one starts: a port for them, their last words, whether they stand still, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path

LAST_LINES = 4
LAST_CHARS = 600
LOOK_S = 0.05


def free_port() -> int:
    """A port of this host that nobody listens on now."""
    return free_ports(1)[0]


def free_ports(count: int, besides: Collection[int] = ()) -> list[int]:
    """`count` different ports of this host that nobody listens on now, none of them among `besides`."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            sock = held.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            if (port := int(sock.getsockname()[1])) not in besides:
                ports.append(port)
        return ports


def last_words(said: str) -> str:
    """The end of what a program printed, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:])[-LAST_CHARS:]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger. False where there is no /proc to tell it (macOS)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] in "Tt"


async def ended_within(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Returns when it has ended, or after `grace_s`."""
    for _ in range(int(grace_s / LOOK_S)):
        if process.poll() is not None:
            return
        await asyncio.sleep(LOOK_S)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal it and everything that it has started; it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
