"""Print a result of `treadle bench run` as the Markdown table of docs/benchmarks.md.

    python benchmarks/markdown.py RESULT.json [FIGURE...]

One row a figure of each workload, one column a target: medians over the rounds, with their range. Without figures,
those that each workload is there to show. Needs the Python that Treadle is installed in.
"""

from __future__ import annotations

import sys
from pathlib import Path

from treadle.bench import formatting
from treadle.bench.ratios import Row, rows
from treadle.bench.samples import Result
from treadle.bench.store import load

USUAL = {
    "burst": ("TTFT p50", "TTFT max / median", "tok/s", "failed"),
    "chat": ("TTFT p50", "gap p50", "tok/s", "failed"),
    "stall": ("gap p99 / idle gap p99", "rate kept", "longest gap / idle median", "long TTFT", "failed"),
    "interactive": ("short TTFT / unloaded", "failed"),
    "cancel": ("follow-up TTFT / idle", "failed"),
    "overload": ("answered", "refused", "refusal p99", "still waiting at the end", "failed", "/health p99"),
    "sweep": ("tok/s", "TTFT p50", "failed"),
    "mixed-length": ("short TTFT p50", "long TTFT"),
    "agents": ("later turn TTFT / first", "prompt tokens reused"),
}


def lines(result: Result, wanted: tuple[str, ...]) -> list[str]:
    names = [target.name for target in result.targets]
    out = [f"| workload | figure | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for workload in result.workloads:
        figures = wanted or USUAL.get(workload.split()[0], ("TTFT p50", "tok/s"))
        found = {row.figure.name: row for row in rows(result, workload)}
        first = workload
        for name in figures:
            if name in found and not empty(found[name]):
                out.append(
                    f"| {first} | {formatting.name(found[name].figure)} | {' | '.join(cells(found[name], names))} |"
                )
                first = ""
    return out


def empty(row: Row) -> bool:
    """A count of nothing for everyone."""
    return not row.figure.unit and not any(value.most for value in row.values.values())


def cells(row: Row, names: list[str]) -> list[str]:
    return [formatting.over_rounds(row.values.get(name), row.figure.unit) for name in names]


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("\n".join(lines(load(Path(sys.argv[1])), tuple(sys.argv[2:]))))


if __name__ == "__main__":
    main()
