"""Prompts for load, and a prober in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from .server import Server

PROBE = Path(__file__).with_name("probe.py")
WORDS = "The ship left the harbour three hours late, and nobody aboard could say why. "

Answers = list[tuple[int, float]]


def prompt_of(index: int, characters: int = 60) -> str:
    """Return a prompt that shares no beginning with another index's."""
    return f"{index} {WORDS * (characters // len(WORDS) + 1)}"[:characters]


async def probed(server: Server, path: str, seconds: float, every_s: float, body: str = "") -> Answers:
    """Return status and seconds of each answer to a prober in a process of its own."""
    prober = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROBE), "127.0.0.1", str(server.port), path, str(seconds), str(every_s)),
        *([body] if body else []),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await prober.communicate()
    return [(int(status), float(took)) for status, took in json.loads(out)]
