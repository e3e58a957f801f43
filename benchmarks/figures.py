"""Tables of the documents, written from result files.

    python benchmarks/figures.py bench RESULT.json --title TEXT [--workload NAME ...] [--figure NAME ...] --out FILE
    python benchmarks/figures.py steps LOG ... --title TEXT --machine TEXT --out FILE
    python benchmarks/figures.py write

`bench` reads a result of `treadle bench run` (medians over the rounds, with their range), `steps` the lines that
`benchmarks/gpu/steps.py` printed. Both make a figure file: columns and rows with the machine, date, commit and command
that they come from. `write` puts each file of docs/figures into the documents, between `<!-- figures: NAME -->` and
`<!-- end -->`. Needs the Python that Treadle is installed in.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from treadle.bench import formatting
from treadle.bench.ratios import FigureRow, rows
from treadle.bench.samples import Machine, Result
from treadle.bench.store import load

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "figures"
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
STEP = re.compile(
    r"(?P<shape>\S+) (?P<bits>\d+) bits, (?P<rows>\d+) x (?P<tokens>\d+): floor (?P<floor>[\d.]+) ms"
    r"; \w+ (?P<ours>[\d.]+) ms = (?P<part>\d+) %, peak [\d.]+ GB"
    r"(?:; generator (?P<theirs>[\d.]+) ms = \d+ %, peak [\d.]+ GB; ratio (?P<ratio>[\d.]+))?"
)
USUAL = {
    "burst": ("TTFT p50", "TTFT max / median", "tok/s", "failed"),
    "chat": ("TTFT p50", "gap p50", "tok/s", "failed"),
    "stall": ("gap p99 / idle gap p99", "rate kept", "long TTFT", "failed"),
    "interactive": ("short TTFT / unloaded", "failed"),
    "cancel": ("follow-up TTFT / idle", "failed"),
    "overload": ("answered", "refused", "refusal p99", "still waiting at the end", "failed"),
    "sweep": ("tok/s", "TTFT p50", "failed"),
    "mixed-length": ("short TTFT p50", "long TTFT"),
    "agents": ("later turn TTFT / first", "prompt tokens reused"),
}
"""The figures that each workload is there to show."""


class Figures(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A measured table and its source. `machine`, `measured` (a date), `commit` and `command` say how to get it again;
    `note` is a sentence for the reader."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    machine: str
    measured: str
    commit: str
    command: str
    note: str = ""

    def markdown(self) -> str:
        """The table with its source below it."""
        lines = [_line(self.columns), _line(["---"] * len(self.columns)), *(_line(row) for row in self.rows)]
        machine = self.machine[:1].upper() + self.machine[1:]
        source = f"*{self.title}. {machine}; {self.measured}, commit {self.commit}; `{self.command}`.*"
        text = textwrap.wrap(f"{source} {self.note}".rstrip(), 120, break_long_words=False, break_on_hyphens=False)
        return "\n".join([*lines, "", *text])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(name: str) -> Figures:
    """The figure file NAME of docs/figures."""
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Figures)


def filled(text: str) -> str:
    """A document with its blocks written anew. Raises FileNotFoundError for a block without a figure file."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{read(match['name']).markdown()}\n{match[3]}"

    return BLOCK.sub(block, text)


def documents() -> Iterator[Path]:
    """The documents that may hold blocks."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def of_bench(result: Result, workloads: Sequence[str], wanted: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a benchmark's result: one row a figure of each workload, one column a target."""
    names = [target.name for target in result.targets]
    table = []
    for workload in workloads or list(result.workloads):
        found = {row.figure.name: row for row in rows(result, workload)}
        first = workload
        for name in wanted or USUAL.get(workload.split()[0], ("TTFT p50", "tok/s")):
            if name in found and not _is_empty(found[name]):
                table.append([first, formatting.name(found[name].figure), *_cells(found[name], names)])
                first = ""
    return ["workload", "figure", *names], table


def _is_empty(row: FigureRow) -> bool:
    """Whether a count is zero for all targets."""
    return not row.figure.unit and not any(value.most for value in row.values.values())


def _cells(row: FigureRow, names: Sequence[str]) -> list[str]:
    return [formatting.over_rounds(row.values.get(name), row.figure.unit) for name in names]


def of_steps(log: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the steps that `benchmarks/gpu/steps.py` printed."""
    table: list[list[str]] = []
    previous = ""
    for found in STEP.finditer(log):
        shape = f"{found['shape']} {'bf16' if found['bits'] == '16' else 'int' + found['bits']}"
        load_ = f"{found['rows']} x {int(found['tokens']):,}"
        theirs = [f"{found['theirs']} ms", found["ratio"]] if found["theirs"] else ["", ""]
        cells = [f"{found['floor']} ms", f"{found['ours']} ms", f"{found['part']} %", *theirs]
        table.append(["" if shape == previous else shape, load_, *cells])
        previous = shape
    return ["shape", "rows x tokens", "floor", "Treadle", "of the floor", "BatchGenerator", "ratio"], table


def machine_of(machine: Machine) -> str:
    """A result's machine in one line."""
    device = machine.accelerator or f"{machine.cores} cores, {machine.processor}"
    return f"{device}, {machine.memory_bytes / (1 << 30):.0f} GiB"


def commit() -> str:
    """The short id of the commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def save(figures: Figures, path: Path) -> None:
    text = json.dumps(msgspec.to_builtins(figures), indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def main() -> None:
    options = _options()
    if options.what == "write":
        for path in documents():
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if options.what == "bench":
        result = load(options.result)
        columns, table = of_bench(result, options.workload, options.figure)
        machine, measured = machine_of(result.machine), result.started[:10]
    else:
        columns, table = of_steps("\n".join(log.read_text(encoding="utf-8") for log in options.logs))
        machine, measured = options.machine, date.today().isoformat()
    save(
        Figures(options.title, columns, table, machine, measured, commit(), options.command, options.note), options.out
    )


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    bench, steps = parts.add_parser("bench"), parts.add_parser("steps")
    parts.add_parser("write")
    bench.add_argument("result", type=Path)
    bench.add_argument("--workload", nargs="*", default=[])
    bench.add_argument("--figure", nargs="*", default=[])
    steps.add_argument("logs", type=Path, nargs="+")
    steps.add_argument("--machine", required=True)
    for part, command in ((bench, "treadle bench run"), (steps, "python benchmarks/gpu/steps.py")):
        part.add_argument("--title", required=True)
        part.add_argument("--note", default="")
        part.add_argument("--command", default=command, help="the command that measured it")
        part.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
