"""Child programs: free ports for them, the end of their output, whether they are stopped, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path

LAST_LINES = 4
LAST_CHARS = 600
_TAIL_CHARS = 1 << 16
_SEARCHED_LINES = 40
_ERROR = re.compile(r"(?:treadle: error: |[\w.]*(?:Error|Exception)\b[^:]*:)")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
POLL_S = 0.05


def free_port() -> int:
    """Return a port of this host that no program listens on now."""
    return free_ports(1)[0]


def free_ports(count: int, besides: Collection[int] = ()) -> list[int]:
    """Return `count` different ports of this host that no program listens on now, none of them in `besides`."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            sock = held.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            if (port := int(sock.getsockname()[1])) not in besides:
                ports.append(port)
        return ports


def last_lines(output: str) -> str:
    """Return the last lines of a program's output, joined into one line without escape sequences: from the last one on
    that names an error, if there is one near the end."""
    text = _ESCAPES.sub("", output[-_TAIL_CHARS:])
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]
    lines = [line for line in lines if line][-_SEARCHED_LINES:]
    errors = [i for i, line in enumerate(lines) if _ERROR.match(line)]
    if errors:
        return " | ".join(lines[errors[-1] :][:LAST_LINES])[:LAST_CHARS]
    return " | ".join(lines[-LAST_LINES:])[-LAST_CHARS:]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger. False on systems without /proc (macOS)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] in "Tt"


async def wait_for_exit(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait until the process has ended, at most `grace_s` seconds."""
    for _ in range(int(grace_s / POLL_S)):
        if process.poll() is not None:
            return
        await asyncio.sleep(POLL_S)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the process and all that it started; it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
