"""Attack a server with thousands of correct and faulty clients, while its processes fail, and check every answer.

    python benchmarks/chaos.py [--requests 2000] [--minutes M] [--seed 0] [--only SEGMENT...] [--out FOLDER]

Starts `treadle serve` on a tiny random model, in processes of its own, and needs the tests' requirements (`make dev`).
HTTP and both gRPC wires are used at once. All requests and faults follow from the seed; a problem names its segment,
which `--only` runs again by itself. Exit code 1 if there were problems.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scored.chaos import figures
from benchmarks.scored.results import row, save
from tests.support.chaos.plan import Fault, Plan
from tests.support.chaos.report import report
from tests.support.chaos.run import OPTIONS, Chaos
from tests.support.chaos.server import Server, raise_own_limit
from tests.support.tiny import make_tiny

CONTEXT = 4096


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--requests", type=int, default=2000, help="stop after that many (default 2000)")
    arguments.add_argument("--minutes", type=float, help="stop after that long instead")
    arguments.add_argument("--segment", type=int, default=400, help="clients from one quiet point to the next")
    arguments.add_argument("--only", type=int, nargs="+", metavar="SEGMENT", help="these segments alone")
    arguments.add_argument("--faults", type=Fault, nargs="+", choices=list(Fault), metavar="FAULT", help="these alone")
    arguments.add_argument("--without", type=Fault, nargs="+", choices=list(Fault), default=[], metavar="FAULT")
    arguments.add_argument("--http-only", action="store_true")
    arguments.add_argument("--grpc-only", action="store_true")
    arguments.add_argument("--ulimit", type=int, default=512, help="descriptors of the server (default 512)")
    arguments.add_argument(
        "--survives-death", action=argparse.BooleanOptionalAction, help="by default, as the server says"
    )
    arguments.add_argument(
        "--out", type=Path, help="keep the server's log there, and the figures for reliability.py page"
    )
    return arguments


def plan_of(options: argparse.Namespace) -> Plan:
    wires = {"http": ("http",), "grpc": ("mlx", "vllm"), "both": ("http", "http", "http", "mlx", "vllm")}
    wire = "http" if options.http_only else "grpc" if options.grpc_only else "both"
    faults = frozenset(options.faults or Fault) - frozenset(options.without)
    return Plan(options.seed, size=options.segment, wires=wires[wire], faults=faults)


def replay_of(options: argparse.Namespace) -> str:
    """Return the command that plans the same, without its segment."""
    words = [f"python benchmarks/chaos.py --seed {options.seed} --segment {options.segment} --ulimit {options.ulimit}"]
    words += ["--http-only"] * options.http_only + ["--grpc-only"] * options.grpc_only
    for name in ("faults", "without"):
        if getattr(options, name):
            words += [f"--{name}", *getattr(options, name)]
    return " ".join(words)


async def run(options: argparse.Namespace, folder: Path) -> int:
    raise_own_limit()
    server = Server(make_tiny(folder / "tiny", context=CONTEXT), folder, OPTIONS, options.ulimit)
    began = time.monotonic()
    segments: Iterable[int] = options.only or itertools.count()

    def enough(chaos: Chaos) -> bool:
        if options.minutes is not None:
            return time.monotonic() - began > 60 * options.minutes
        return chaos.requests >= options.requests and not options.only

    def say(text: str) -> None:
        print(text, flush=True)

    async with Chaos(plan_of(options), server, options.survives_death, say=say) as chaos:
        await chaos.run(segments, enough)
    took_s = time.monotonic() - began
    print(report(chaos, took_s, replay_of(options)))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        command = f"{replay_of(options)} --requests {chaos.requests}"
        save(options.out / "reliability.json", command, [row("R8", "treadle", figures(chaos, took_s))])
    return 1 if chaos.problems else 0


def main() -> None:
    options = parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="treadle-chaos-"))
    try:
        code = asyncio.run(run(options, folder))
        if options.out is not None:
            shutil.copy(folder / "server.log", options.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
