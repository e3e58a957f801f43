"""Measure the reliability targets R1 to R8 and S1 to S4, and write them as docs/reliability.md.

    python benchmarks/reliability.py run MODEL [--row R1 ...] [--server treadle --server mlx-lm] [--out FILE.json]
    python benchmarks/reliability.py page FILE.json... > docs/reliability.md

MODEL is a folder: `benchmarks/tiny_model.py` writes one that makes the server the slow part. Each row starts a server
of its own, as users do, and attacks it over its sockets. Peers (`benchmarks/peers.py install`) are measured by the rows
that any server can be measured by. R4, R8 and S4 have programs of their own: `benchmarks/poison.py`,
`benchmarks/chaos.py` and the tests of hostile folders; each writes a file that `page` takes too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import psutil
from scored import own, portable
from scored.figures import Figure
from scored.page import written
from scored.server import PEERS, Server, peer, treadle

Row = Callable[[Server, float], Awaitable[list[Figure]]]

PORTABLE: dict[str, Row] = {
    "R1": lambda server, seconds: portable.leavers(server),
    "R2": lambda server, seconds: portable.overload(server, seconds),
    "R6": lambda server, seconds: portable.drain(server),
    "R7": lambda server, seconds: portable.event_loop(server, seconds / 6),
    "S2": lambda server, seconds: portable.browser(server),
}
OWN: dict[str, Callable[[Path, Path], Awaitable[list[Figure]]]] = {
    "R3": own.faults,
    "R5": own.oversubscribed,
    "S1": own.behind_the_key,
    "S3": own.tenants,
}
OPTIONS = {"R2": ("--max-running", "4"), "R6": ("--max-running", "4")}


async def measure(row: str, name: str, model: Path, log: Path, seconds: float) -> list[Figure]:
    if row in OWN:
        return await OWN[row](model, log)
    server = treadle(model, log, OPTIONS.get(row, ())) if name == "treadle" else peer(name, model, log)
    await server.start()
    try:
        return await PORTABLE[row](server, seconds)
    finally:
        await server.stop()


def run(options: argparse.Namespace) -> None:
    """Measure the rows of each server, and keep what was found so far after each."""
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in options.row or sorted({*PORTABLE, *OWN}):
            for name in options.server or ["treadle"]:
                if row in OWN and name != "treadle":
                    continue
                began = time.perf_counter()
                figures = asyncio.run(measure(row, name, options.model, Path(folder) / f"{name}.log", options.seconds))
                found.append({"row": row, "server": name, "figures": [asdict(figure) for figure in figures]})
                print(f"{row} {name} ({time.perf_counter() - began:.0f} s)", flush=True)
                for figure in figures:
                    mark = {True: "met", False: "NOT MET", None: ""}[figure.met]
                    print(f"  {figure.what}: {figure.value}  {mark}", flush=True)
                options.out.write_text(
                    json.dumps(
                        {"about": about(f"python benchmarks/reliability.py run {options.model.name}"), "rows": found},
                        indent=1,
                    )
                )


def keep(file: Path, command: str, rows: list[dict[str, object]]) -> None:
    """Write what `command` has measured so far."""
    file.write_text(json.dumps({"about": about(command), "rows": rows}, indent=1))


def about(command: str) -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run", help="measure")
    running.add_argument("model", type=Path, metavar="MODEL")
    running.add_argument("--row", action="append", choices=sorted({*PORTABLE, *OWN}))
    running.add_argument("--server", action="append", choices=["treadle", *PEERS])
    running.add_argument("--seconds", type=float, default=60.0, help="of overload and of hostile load")
    running.add_argument("--out", type=Path, default=Path("reliability.json"), metavar="FILE.json")
    writing = actions.add_parser("page", help="write what was measured as Markdown")
    writing.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    options = parser.parse_args()
    if options.action == "run":
        run(options)
    else:
        print(written([json.loads(file.read_text()) for file in options.files]), end="")


if __name__ == "__main__":
    main()
