"""Files of results: what was measured, with the command, date, commit and machine."""

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
    """One target's figures of one server."""
    return {"row": name, "server": server, "figures": [asdict(figure) for figure in figures]}


def keep(file: Path, command: str, rows: Sequence[dict[str, object]]) -> None:
    """Write what `command` has measured so far, for `reliability.py page`."""
    file.write_text(json.dumps({"about": about(command), "rows": rows}, indent=1))


def about(command: str) -> dict[str, str]:
    """How, when, of which commit and on what machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
