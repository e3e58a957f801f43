"""Tables of results and comparisons for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from . import formatting
from .compare import Comparison, FigureCheck
from .live import LiveTable
from .ratios import FigureRow, Range, judge
from .samples import Result
from .sections import Grid, Section, Sweep, sections

__all__ = ["LiveTable", "comparison_table", "result_table"]

VERDICTS = {"better": (" +", "green"), "worse": (" −", "red"), "even": ("  ", "")}
MAX_NAME_CHARS = 28
FIGURE_COLUMNS, VALUE_COLUMNS, RATIO_COLUMNS = 24, 26, 20


def result_table(result: Result) -> RenderableType:
    """Build a table of each workload's figures: medians over the rounds with their least and most, the targets side by
    side, and their ratios to the first in the same rounds. Below, the reasons of incomplete answers, and the reason of
    a run that ended early."""
    found = sections(result)
    parts: list[RenderableType] = []
    for section in found:
        parts += [_heading(section), *map(_GridTable, section.grids), *map(_remark, section.remarks), Text()]
    if not parts:
        return Text("no workload was run")
    ending = [_remark(text)] if (text := formatting.ending(result)) else []
    return Group(*parts, Text(_how_to_read(result), style="dim"), *ending)


def _heading(section: Section | Sweep) -> Text:
    if isinstance(section, Sweep):
        return Text(f"sweep over {len(section.levels)} concurrencies", style="bold")
    info = section.info
    rounds = len({round_.number for round_ in section.rounds})
    concurrency = f", {info.concurrency} at a time" if info.concurrency else ""
    text = f"{info.requests:,} request{'s' * (info.requests != 1)} a round{concurrency}; rounds: {rounds}"
    return Text.assemble((formatting.printable(section.name, 80), "bold"), f"  {text}")


def _how_to_read(result: Result) -> str:
    text = "Median over the rounds (least..most). ↓ lower is better, ↑ higher is better."
    if len(result.targets) > 1:
        first = formatting.printable(result.targets[0].name, MAX_NAME_CHARS)
        text += f" Ratios are to {first} in the same round: + better, − worse, else rounds disagree or are within 2 %."
    return text


def _remark(text: str) -> Text:
    return Text(f"  {formatting.printable(text)}", style="yellow")


class _GridTable:
    """A grid, in several tables if the terminal is narrow; each has the first target, to compare with."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, compared = self._grid.targets[:1], self._grid.targets[1:]
        width = options.max_width - FIGURE_COLUMNS - VALUE_COLUMNS
        step = max(1, width // (VALUE_COLUMNS + RATIO_COLUMNS))
        for start in range(0, len(compared), step) if compared else (0,):
            yield self._table([*first, *compared[start : start + step]])

    def _table(self, targets: Sequence[str]) -> Table:
        table = Table(show_edge=False, pad_edge=False, header_style="bold", title_justify="left")
        if self._grid.corner:
            table.title = Text(self._grid.title)
        table.add_column(self._grid.corner, justify="right" if self._grid.corner else "left")
        for i, name in enumerate(targets):
            table.add_column(Text(formatting.printable(name, MAX_NAME_CHARS)), justify="right")
            if i:
                table.add_column("ratio", justify="right")
        for label, row in self._grid.rows:
            table.add_row(label, *_cells(row, targets))
        return table


def _cells(row: FigureRow, targets: Sequence[str]) -> Iterator[Text]:
    for i, name in enumerate(targets):
        yield Text(formatting.over_rounds(row.values.get(name), row.figure.unit))
        if i:
            yield _ratio(row, row.ratios.get(name))


def _ratio(row: FigureRow, values: Range | None) -> Text:
    if values is None:
        return Text("")
    mark, style = VERDICTS[judge(values, row.figure.better)]
    return Text(formatting.ratio_over_rounds(values) + mark, style=style)


# Comparisons ------------------------------------------------------------------------------------------------------


def comparison_table(comparison: Comparison) -> RenderableType:
    """Build a table of every figure that has a limit, except counts that stayed 0, and the verdict. A ratio above 1 is
    a worsening, in either direction of a figure."""
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("figure")
    for heading in ("before", "after", "times worse", "limit", ""):
        table.add_column(heading, justify="right")
    last = ("", "")
    for check in filter(_is_relevant, comparison.checks):
        section = (check.workload, check.target)
        if section != last:
            table.add_section()
            table.add_row(
                Text(
                    f"{formatting.printable(check.workload, 30)}, {formatting.printable(check.target, 30)}",
                    style="bold",
                )
            )
        table.add_row(*_check_cells(check))
        last = section
    notes = [Text(f"note: {formatting.printable(note)}", style="yellow") for note in comparison.notes]
    return Group(table, *notes, _verdict(comparison))


def _is_relevant(check: FigureCheck) -> bool:
    return check.limit is not None and not (check.passed and not check.a and not check.b)


def _check_cells(check: FigureCheck) -> Iterator[Text]:
    unit = check.figure.unit
    yield Text(f"  {formatting.name(check.figure)}")
    yield Text(formatting.value(check.a, unit))
    yield Text(formatting.value(check.b, unit))
    yield Text("–" if check.ratio is None else formatting.ratio(check.ratio))
    yield Text("" if check.limit is None else formatting.ratio(check.limit))
    yield Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")


def _verdict(comparison: Comparison) -> Text:
    limited = [check for check in comparison.checks if check.limit is not None]
    failed = [check for check in limited if not check.passed]
    if not failed:
        return Text(f"PASS: {len(limited)} figures are within their limits", style="bold green")
    names = "; ".join(
        f"{formatting.printable(c.workload, 40)}, {formatting.printable(c.target, 40)}: {c.figure.name}"
        for c in failed[:5]
    )
    more = f"; and {len(failed) - 5} more" if len(failed) > 5 else ""
    return Text(f"FAIL: {len(failed)} of {len(limited)} figures are over their limit ({names}{more})", style="bold red")
