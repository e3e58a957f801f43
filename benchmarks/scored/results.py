"""Files of results: figures with the command, date, commit and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .figures import Figure


def row(name: str, server: str, figures: Sequence[Figure]) -> dict[str, object]:
    """Return one target's figures of one server."""
    return {"row": name, "server": server, "figures": [asdict(figure) for figure in figures]}


def save(file: Path, command: str, rows: Sequence[dict[str, object]]) -> None:
    """Write the figures of `command` so far, for `reliability.py page`."""
    file.write_text(json.dumps({"about": source_of(command), "rows": rows}, indent=1))


def source_of(command: str) -> dict[str, str]:
    """Return command, date, commit and machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
