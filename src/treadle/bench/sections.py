"""Result in reading order: one section a workload, and the levels of a sweep gathered in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from . import formatting, ratios
from .ratios import FigureRow
from .samples import Result, Round, WorkloadInfo

SWEEP = "sweep c="
SWEPT = ("tok/s", "TTFT p50", "TTFT p99", "gap p50", "gap p99", "good answers")
MAX_REASONS = 6
MAX_REASON_CHARS = 160
MAX_NAME_CHARS = 60


class Grid(msgspec.Struct, frozen=True):
    """Rows of figures under targets. `corner` is the heading of the rows' labels."""

    title: str
    corner: str
    targets: list[str]
    rows: list[tuple[str, FigureRow]]


class Section(msgspec.Struct, frozen=True):
    """One workload: `rows` has all its figures, `grids` the informative ones, `remarks` the failures in words."""

    name: str
    info: WorkloadInfo
    rounds: list[Round]
    targets: list[str]
    rows: list[FigureRow]
    remarks: list[str]

    @property
    def grids(self) -> list[Grid]:
        chosen = ratios.informative(self.rows)
        return (
            [Grid(self.name, "", self.targets, [(formatting.name(row.figure), row) for row in chosen])]
            if chosen
            else []
        )


class Sweep(msgspec.Struct, frozen=True):
    """The same workload at several concurrencies, from the least to the most."""

    levels: list[tuple[int, Section]]
    targets: list[str]

    @property
    def name(self) -> str:
        return "sweep"

    @property
    def remarks(self) -> list[str]:
        return [f"{section.name}: {remark}" for _, section in self.levels for remark in section.remarks]

    @property
    def grids(self) -> list[Grid]:
        """One grid for each figure of SWEPT that is informative at any level."""
        chosen = {row.figure.name for _, section in self.levels for row in ratios.informative(section.rows)}
        return [self._grid(name) for name in SWEPT if name in chosen]

    def swept(self, figure: str) -> list[tuple[int, FigureRow]]:
        """Return that figure's row at each concurrency which has it."""
        return [(c, row) for c, section in self.levels for row in section.rows if row.figure.name == figure]

    def _grid(self, figure: str) -> Grid:
        found = self.swept(figure)
        title = f"sweep: {formatting.name(found[0][1].figure)}"
        return Grid(title, "concurrency", self.targets, [(f"{c}", row) for c, row in found])


def sections(result: Result) -> list[Section | Sweep]:
    """Return all workloads in the order in which they ran; a sweep stands in the place of its first level."""
    found: list[Section | Sweep] = []
    levels: list[tuple[int, Section]] = []
    for name, info in result.workloads.items():
        section = _section(result, name, info)
        level = _level(name)
        if level is None:
            found.append(section)
            continue
        if not levels:
            found.append(Sweep(levels, [target.name for target in result.targets]))
        levels.append((level, section))
    levels.sort(key=lambda entry: entry[0])
    return found


def _section(result: Result, name: str, info: WorkloadInfo) -> Section:
    rounds = result.rounds.get(name, [])
    names = ratios.targets(result, name)
    return Section(name, info, rounds, names, ratios.rows(result, name), list(_remarks(rounds, names)))


def _level(name: str) -> int | None:
    digits = name.removeprefix(SWEEP)
    return int(digits) if digits != name and digits.isascii() and digits.isdecimal() else None


def _remarks(rounds: Sequence[Round], names: Sequence[str]) -> Iterable[str]:
    """Describe the causes of incomplete answers, by target, and servers that ended."""
    for name in names:
        own = [round_ for round_ in rounds if round_.target == name]
        target = formatting.printable(name, MAX_NAME_CHARS)
        causes = Counter((s.outcome, s.reason) for r in own for s in r.samples if s.outcome != "ok")
        for (outcome, reason), count in causes.most_common(MAX_REASONS):
            cause = f": {formatting.printable(reason, MAX_REASON_CHARS)}" if reason else ""
            yield f"{target}: {count:,} × {outcome}{cause}"
        if len(causes) > MAX_REASONS:
            yield f"{target}: {len(causes) - MAX_REASONS:,} more reasons, each rarer"
        for round_ in own:
            if round_.crash:
                crash = formatting.printable(round_.crash, MAX_REASON_CHARS)
                yield f"{target}: ended in round {round_.number}: {crash}"
