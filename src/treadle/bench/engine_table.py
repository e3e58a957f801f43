"""Table of `treadle bench engine` for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..units import size
from .engine_figures import OURS, THEIRS, Agreement, Batch, EngineResult
from .formatting import ratio_over_rounds, value
from .ratios import FigureRow, Range, judge

STYLES = {"better": "green", "worse": "red", "even": ""}


def engine_table(result: EngineResult) -> RenderableType:
    """Build a table of each batch size's figures side by side: medians, and the ratio with its least and most."""
    load = f"{result.prompt} prompt tokens, {result.tokens} generated per sequence"
    table = Table(title=f"{result.model} ({result.dtype}), {load}")
    for name in ("batch", "", OURS, THEIRS, "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    for batch in result.batches:
        for i, row in enumerate(batch.figures):
            table.add_row("" if i else str(batch.size), row.figure.name, *_cells(row))
        table.add_section()
    path = {} if result.compute is None else {"compute path": result.compute.summary()}
    details = ", ".join(f"{key} {value}" for key, value in (result.details | path).items())
    return Group(table, *(Text(agreement_line(batch)) for batch in result.batches), Text(details, style="dim"))


def _cells(row: FigureRow) -> tuple[str | Text, ...]:
    ratio = row.ratios.get(OURS)
    style = "" if ratio is None else STYLES[judge(ratio, row.figure.better)]
    medians = (_median(row.values.get(engine), row.figure.unit) for engine in (OURS, THEIRS))
    return *medians, Text(ratio_over_rounds(ratio), style=style)


def _median(values: Range | None, unit: str) -> str:
    if values is None or unit != "bytes":
        return value(None if values is None else values.median, unit)
    return size(values.median)


def agreement_line(batch: Batch) -> str:
    """Report in one line whether both engines gave the same tokens."""
    rows = sum(round_.rows for round_ in batch.agreement)
    if batch.all_equal:
        return f"batch {batch.size}: greedy tokens equal in all {rows} rows"
    equal = sum(round_.equal for round_ in batch.agreement)
    return f"batch {batch.size}: greedy tokens equal in {equal} of {rows} rows; {_first_divergence(batch.agreement)}"


def _first_divergence(rounds: tuple[Agreement, ...]) -> str:
    first = min(((r.first_divergence, r.round) for r in rounds if r.first_divergence is not None), default=None)
    assert first is not None, "rows that are not equal part somewhere"
    return f"the earliest parts at token {first[0]}, in round {first[1]}"
