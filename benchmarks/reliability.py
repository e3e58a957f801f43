"""Measure the reliability targets R1 to R8 and S1 to S4, and write them as docs/reliability.md.

    python benchmarks/reliability.py run MODEL [--row R1 ...] [--server treadle --server mlx-lm] [--out FILE.json]
    python benchmarks/reliability.py page FILE.json... > docs/reliability.md

MODEL is a folder: `benchmarks/tiny_model.py` writes one that makes the server the slow part. Each row starts a server
of its own, as users do, and attacks it over its sockets. Peers (`benchmarks/peers.py install`) are measured by the rows
that apply to any server. R4 and R8 have programs of their own: `benchmarks/poison.py` and
`benchmarks/chaos.py`; each writes a file that `page` takes too. Of a row and server that several files hold, the last
file's figures are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scored import browser, ending, faults, lag, leaving, memory, overload, routes, supply, tenants
from benchmarks.scored.figures import Figure
from benchmarks.scored.page import written
from benchmarks.scored.results import row, save
from benchmarks.scored.server import PEERS, Server, peer, treadle

Portable = Callable[[Server, float], Awaitable[list[Figure]]]
Own = Callable[[Path, Path], Awaitable[list[Figure]]]

PORTABLE: Mapping[str, Portable] = {
    "R1": lambda server, seconds: leaving.leavers(server),
    "R2": overload.overload,
    "R6": lambda server, seconds: ending.drain(server),
    "R7": lambda server, seconds: lag.event_loop(server, seconds / 8),
    "S2": lambda server, seconds: browser.browser(server),
}
OWN: Mapping[str, Own] = {
    "R1": leaving.work_for_nobody,
    "R3": faults.faults,
    "R5": memory.oversubscribed,
    "R7": lag.floods,
    "S1": routes.behind_the_key,
    "S3": tenants.tenants,
    "S4": supply.chain,
}
SECONDS = 60.0
ROWS = sorted({*PORTABLE, *OWN})
OPTIONS = {
    "R2": ("--max-running", str(overload.SLOTS)),
    "R6": ("--max-running", "4", "--grpc-port", "0"),
    "R7": lag.OPTIONS,
}


async def measure(name: str, server: str, model: Path, folder: Path, seconds: float) -> list[Figure]:
    """Measure the figures of one row of one server: the portable part, then that of Treadle alone."""
    figures = []
    if name in PORTABLE:
        log = folder / f"{name}-{server}.log"
        figures += await portable(name, treadle(model, log, OPTIONS.get(name, ())), server, seconds, model, log)
    if name in OWN and server == "treadle":
        figures += await OWN[name](model, folder / f"{name}-own.log")
    return figures


async def portable(name: str, own: Server, server: str, seconds: float, model: Path, log: Path) -> list[Figure]:
    measured = own if server == "treadle" else peer(server, model, log)
    await measured.start()
    try:
        return await PORTABLE[name](measured, seconds)
    finally:
        await measured.stop()


def run(options: argparse.Namespace) -> None:
    """Measure the rows of each server, and write the results so far after each. A row that can't be measured is
    reported at the end; the remaining ones are measured all the same."""
    found, failed = [], []
    command = command_of(options)
    options.logs.mkdir(parents=True, exist_ok=True)
    for name in options.row or ROWS:
        for server in options.server or ["treadle"]:
            if server != "treadle" and name not in PORTABLE:
                continue
            began = time.perf_counter()
            try:
                figures = asyncio.run(measure(name, server, options.model, options.logs, options.seconds))
            except (Exception, SystemExit) as error:
                failed.append(f"{name} {server}: {type(error).__name__}: {error}")
                print(failed[-1], flush=True)
                continue
            found.append(row(name, server, figures))
            print_figures(f"{name} {server} ({time.perf_counter() - began:.0f} s)", figures, judged=server == "treadle")
            save(options.out, command, found)
    if failed:
        sys.exit("\n".join(["could not be measured:", *failed]))


def command_of(options: argparse.Namespace) -> str:
    """Return the command line that measures the same."""
    arguments = ["python benchmarks/reliability.py run", options.model.name]
    arguments += [f"--seconds {options.seconds:g}"] if options.seconds != SECONDS else []
    return " ".join(arguments)


def print_figures(head: str, figures: list[Figure], *, judged: bool) -> None:
    """Print the figures. Peers are not judged: they have promised none of it."""
    print(head)
    for figure in figures:
        print(f"  {figure.what}: {figure.value}{'  NOT MET' if judged and figure.met is False else ''}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run", help="measure")
    running.add_argument("model", type=Path, metavar="MODEL")
    running.add_argument("--row", action="append", choices=ROWS)
    running.add_argument("--server", action="append", choices=["treadle", *PEERS])
    running.add_argument("--seconds", type=float, default=SECONDS, help="of overload, and of all hostile load together")
    running.add_argument("--out", type=Path, default=Path("reliability.json"), metavar="FILE.json")
    running.add_argument("--logs", type=Path, metavar="FOLDER", help="where the servers' logs stay")
    writing = actions.add_parser("page", help="write what was measured as Markdown")
    writing.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    options = parser.parse_args()
    if options.action == "page":
        print(written([json.loads(file.read_text()) for file in options.files]), end="")
        return
    with tempfile.TemporaryDirectory() as folder:
        options.logs = options.logs or Path(folder)
        run(options)


if __name__ == "__main__":
    main()
