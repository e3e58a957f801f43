"""Load a server for hours with the clients of the chaos tests, and plot the resources that its processes hold.

    python benchmarks/soak.py OUT [--minutes 60] [--seed 0] [--segment 3000] [--faults FAULT...]

Starts `treadle serve` on a tiny random model, in processes of its own, and needs the tests' requirements (`make dev`).
After each `--segment` clients comes a quiet point: no client is connected, every slot must be free, all counters must
add up, and the resources of both processes are a row of OUT/soak.csv. OUT/soak.html has the plots, each of which is an
SVG too; OUT/reliability.json has the figures for `benchmarks/reliability.py page`. No faults by default. Exit code 1 if
an answer was wrong or a figure drifted by more than 2 % after the warm-up, the first quarter of the quiet points;
memory is compared over one process's life.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scored.chaos import figures
from benchmarks.scored.results import row, save
from tests.support.chaos.plan import Fault, Plan
from tests.support.chaos.points import Quiet
from tests.support.chaos.report import report
from tests.support.chaos.run import OPTIONS, Chaos
from tests.support.chaos.server import Server, raise_own_limit
from tests.support.tiny import make_tiny

from treadle.bench.measures import quantile
from treadle.bench.plots import shade
from treadle.bench.style import STYLE
from treadle.bench.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Axis, Scale, axes, drawing, even_ticks, number

HEIGHT = 290.0
CONTEXT = 4096
MIB = 1 << 20
COLUMNS = (
    *("minutes", "requests", "requests_per_s", "tokens_per_s", "latency_p50_ms", "latency_p99_ms"),
    *("server_rss_mib", "server_pss_mib", "server_fds", "server_threads"),
    *("engine_rss_mib", "engine_pss_mib", "engine_fds", "engine_threads"),
)
PLOTS = {
    "memory": ("MiB", ("server_rss_mib", "server_pss_mib", "engine_rss_mib", "engine_pss_mib")),
    "descriptors": ("open", ("server_fds", "engine_fds")),
    "threads": ("threads", ("server_threads", "engine_threads")),
    "requests": ("requests/s", ("requests_per_s",)),
    "tokens": ("tok/s", ("tokens_per_s",)),
    "latency": ("ms", ("latency_p50_ms", "latency_p99_ms")),
}

Row = dict[str, float]


@dataclass
class QuietTable:
    """Table of the quiet points, written row by row."""

    path: Path
    rows: list[Row]
    began: float

    def add(self, before: Quiet | None, point: Quiet) -> None:
        since = before.at if before else self.began
        passed_s = point.at - since
        row = {
            "minutes": (point.at - self.began) / 60,
            "requests": float(point.requests),
            "requests_per_s": (point.requests - (before.requests if before else 0)) / passed_s,
            "tokens_per_s": (point.tokens - (before.tokens if before else 0)) / passed_s,
            "latency_p50_ms": 1000 * quantile(sorted(point.latencies), 0.5) if point.latencies else 0.0,
            "latency_p99_ms": 1000 * quantile(sorted(point.latencies), 0.99) if point.latencies else 0.0,
        }
        for process, usage in (("server", point.server), ("engine", point.engine)):
            row |= {
                f"{process}_rss_mib": usage.rss / MIB if usage else 0.0,
                f"{process}_pss_mib": usage.pss / MIB if usage else 0.0,
                f"{process}_fds": float(usage.fds) if usage else 0.0,
                f"{process}_threads": float(usage.threads) if usage else 0.0,
            }
        self.rows.append(row)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if len(self.rows) == 1:
                writer.writeheader()
            writer.writerow({name: round(value, 3) for name, value in row.items()})


def plot(name: str, rows: Sequence[Row]) -> str:
    """Return one plot over the run's minutes, as an SVG's text."""
    unit, columns = PLOTS[name]
    longest, highest = rows[-1]["minutes"], max(row[column] for row in rows for column in columns)
    across, upwards = even_ticks(longest), even_ticks(highest)
    x = Scale(0, max(longest, 1e-9), LEFT, WIDTH - RIGHT)
    y = Scale(0, max(upwards[-1], highest), HEIGHT - BOTTOM, TOP)
    parts = [
        axes(
            Axis(x, [(tick, f"{tick:g}") for tick in across if tick <= longest], "minutes"),
            Axis(y, [(tick, f"{tick:,g}") for tick in upwards], unit),
        )
    ]
    for i, column in enumerate(columns):
        line = "L".join(f"{number(x.at(row['minutes']))} {number(y.at(row[column]))}" for row in rows)
        parts.append(f'<path class="line {shade(i)}" d="M{line}"/>')
    description = "; ".join(f"{column}: {rows[0][column]:,.1f} to {rows[-1][column]:,.1f}" for column in columns)
    return drawing(name, HEIGHT, name, description, parts)


def write_plots(out: Path, rows: Sequence[Row], words: str) -> None:
    """Write the page, and each plot as a file of its own."""
    figures = []
    for name, (_, columns) in PLOTS.items():
        svg = plot(name, rows)
        head = '<svg xmlns="http://www.w3.org/2000/svg" '
        (out / f"{name}.svg").write_text(svg.replace("<svg ", head, 1).replace(">", f"><style>{STYLE}</style>", 1))
        legend = "".join(_legend(shade(i), column) for i, column in enumerate(columns))
        figures.append(f'<figure><figcaption>{name}</figcaption>{svg}<ul class="legend">{legend}</ul></figure>')
    title = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Soak</title>'
    body = f'<main><h1>Soak</h1><section><pre>{words}</pre><div class="plots">{"".join(figures)}</div></section></main>'
    (out / "soak.html").write_text(f"{title}<style>{STYLE}</style>{body}</html>")


def _legend(shade_: str, name: str) -> str:
    line = f'<path class="line {shade_}" d="M0 6H30"/>'
    return f'<li><svg class="swatch" viewBox="0 0 30 12">{line}</svg>{name}</li>'


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path, metavar="OUT")
    arguments.add_argument("--minutes", type=float, default=60.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--segment", type=int, default=3000, help="clients from one quiet point to the next")
    arguments.add_argument("--faults", type=Fault, nargs="+", choices=list(Fault), default=[], metavar="FAULT")
    arguments.add_argument("--ulimit", type=int, default=512, help="descriptors of the server (default 512)")
    return arguments


async def run(options: argparse.Namespace, folder: Path) -> int:
    raise_own_limit()
    server = Server(make_tiny(folder / "tiny", context=CONTEXT), folder, OPTIONS, options.ulimit)
    plan = Plan(options.seed, size=options.segment, faults=frozenset(options.faults))
    began = time.monotonic()
    table = QuietTable(options.out / "soak.csv", [], began)

    def enough(chaos: Chaos) -> bool:
        if chaos.quiet:
            table.add(chaos.quiet[-2] if len(chaos.quiet) > 1 else None, chaos.quiet[-1])
        return time.monotonic() - began > 60 * options.minutes

    def say(text: str) -> None:
        print(text, flush=True)

    async with Chaos(plan, server, say=say) as chaos:
        await chaos.run(itertools.count(), enough)
    replay = f"python benchmarks/chaos.py --seed {options.seed} --segment {options.segment} --ulimit {options.ulimit}"
    faults = " ".join(options.faults) or Fault.NONE
    took_s = time.monotonic() - began
    words = report(chaos, took_s, f"{replay} --faults {faults}")
    print(words)
    command = f"python benchmarks/soak.py OUT --minutes {options.minutes:g} --seed {options.seed} --faults {faults}"
    save(options.out / "reliability.json", command, [row("R8", "treadle", figures(chaos, took_s, "soak"))])
    write_plots(options.out, table.rows, words)
    return 1 if chaos.problems else 0


def main() -> None:
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.csv").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="treadle-soak-") as folder:
        sys.exit(asyncio.run(run(options, Path(folder))))


if __name__ == "__main__":
    main()
