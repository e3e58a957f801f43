"""Figures of each workload over its rounds, target by target, and ratios between rounds that ran side by side.

Rounds are interleaved (A B A B), so round k of one target is compared with round k of another: a slow phase of the
machine slows both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from .measures import Figures, Percentiles, figures, percentiles, workload_figures
from .samples import Result, Round

Better = Literal["lower", "higher", "neither"]
Verdict = Literal["better", "worse", "even"]
EVEN = 0.02


class Range(msgspec.Struct, frozen=True):
    """One value a round; never empty."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def most(self) -> float:
        return max(self.values)


class Figure(msgspec.Struct, frozen=True):
    """Name and unit of a figure. `unit` is "s", "tok/s", "req/s", "tokens", "part" (of 1), "x" (a ratio) or "" (a
    count)."""

    name: str
    unit: str
    better: Better


class FigureRow(msgspec.Struct, frozen=True):
    """One figure of a workload. `values` has its values by target, `ratios` those of each other target divided by the
    first target's in the same round. Targets without values are left out; figures that are neither better high nor low
    have no ratios."""

    figure: Figure
    values: dict[str, Range]
    ratios: dict[str, Range]


class _Common(msgspec.Struct, frozen=True):
    figure: Figure
    read: Callable[[Figures], float | None]


def _percentile(part: str, percentile: str) -> Callable[[Figures], float | None]:
    def read(collected: Figures) -> float | None:
        values: Percentiles | None = getattr(collected, part)
        return None if values is None else float(getattr(values, percentile))

    return read


def _count(outcome: str) -> Callable[[Figures], float | None]:
    return lambda collected: float(collected.answers.get(outcome, 0))


COMMON = (
    _Common(Figure("TTFT p50", "s", "lower"), _percentile("ttft", "p50")),
    _Common(Figure("TTFT p99", "s", "lower"), _percentile("ttft", "p99")),
    _Common(Figure("TTFT max", "s", "lower"), _percentile("ttft", "max")),
    _Common(Figure("TTFT max / median", "x", "lower"), lambda collected: collected.flatness),
    _Common(Figure("gap p50", "s", "lower"), _percentile("gap", "p50")),
    _Common(Figure("gap p99", "s", "lower"), _percentile("gap", "p99")),
    _Common(Figure("total p50", "s", "lower"), _percentile("total", "p50")),
    _Common(Figure("total p99", "s", "lower"), _percentile("total", "p99")),
    _Common(Figure("tok/s", "tok/s", "higher"), lambda collected: collected.tokens_per_s),
    _Common(Figure("tok/s a stream", "tok/s", "higher"), _percentile("stream_tokens_per_s", "p50")),
    _Common(Figure("goodput", "req/s", "higher"), lambda collected: collected.goodput_per_s),
    _Common(Figure("good answers", "part", "higher"), lambda collected: collected.good),
    _Common(Figure("answered", "", "neither"), _count("ok")),
    _Common(Figure("refused", "", "neither"), _count("refused")),
    _Common(Figure("failed", "", "lower"), _count("failed")),
    _Common(Figure("incomplete", "", "lower"), _count("incomplete")),
    _Common(Figure("refusal p99", "s", "lower"), _percentile("refusal", "p99")),
)
CLIENT_LAG = Figure("client lag p99", "s", "neither")
UNANSWERED = Figure("control looks unanswered", "", "lower")
EXPECTED = {"good answers": 1.0, "refused": 0.0, "failed": 0.0, "incomplete": 0.0, UNANSWERED.name: 0.0}
HIGHER = (
    "rate kept",
    "refusals with Retry-After",
    "prompt tokens reused",
    "drafts accepted",
    "valid answers",
    "valid calls",
    "ended answers",
    "free rate kept",
)
COUNTS = ("neither answered nor refused", "still waiting at the end")
TOKENS: dict[str, Better] = {"wasted tokens a cancel": "lower", "tokens a verification": "higher"}


def rows(result: Result, workload: str) -> list[FigureRow]:
    """Return all figures of `workload`, in reading order, without those that no target has."""
    goodput = result.workloads[workload].goodput
    collected: dict[Figure, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for round_ in result.rounds.get(workload, []):
        for figure, value in values(workload, round_, goodput):
            collected[figure][round_.target][round_.number] = value
    names = targets(result, workload)
    return [figure_row(figure, names, by_target) for figure, by_target in sorted(collected.items(), key=_order)]


def targets(result: Result, workload: str) -> list[str]:
    """Return the names of the targets that ran `workload`, in the order of the result."""
    ran = {round_.target for round_ in result.rounds.get(workload, [])}
    return [target.name for target in result.targets if target.name in ran]


def informative(found: Sequence[FigureRow]) -> list[FigureRow]:
    """Select the informative rows: without those of QUIET that have their expected value in every round, and without a
    p99 that equals the maximum because there were too few values."""
    values_of = {row.figure.name: row.values for row in found}
    return [row for row in found if not _is_uninformative(row, values_of)]


def _is_uninformative(row: FigureRow, values_of: dict[str, dict[str, Range]]) -> bool:
    name = row.figure.name
    if name in EXPECTED:
        return all(value == EXPECTED[name] for range_ in row.values.values() for value in range_.values)
    return name.endswith(" p99") and values_of.get(f"{name.removesuffix(' p99')} max") == row.values


def judge(ratio: Range, better: Better) -> Verdict:
    """Judge whether the other target is better than the first. Rounds that disagree, or a median within 2 %, are
    even."""
    if better == "neither" or abs(ratio.median - 1) < EVEN or ratio.least <= 1 <= ratio.most:
        return "even"
    return "better" if (ratio.median < 1) == (better == "lower") else "worse"


def values(workload: str, round_: Round, goodput: tuple[float, float]) -> list[tuple[Figure, float]]:
    """Return every figure of one round, each once."""
    collected = figures(round_, goodput)
    found = [(common.figure, common.read(collected)) for common in COMMON]
    found += _control_figures(round_)
    found += [(_workload_figure(name), value) for name, value in workload_figures(workload, round_).items()]
    once = {figure.name: (figure, value) for figure, value in reversed(found) if value is not None}
    return list(reversed(once.values()))


def _control_figures(round_: Round) -> list[tuple[Figure, float | None]]:
    """Return the figures of the control routes and of the client's own lag."""
    paths = dict.fromkeys(probe.path for probe in round_.control)
    found: list[tuple[Figure, float | None]] = [
        (Figure(f"{path} p99", "s", "lower"), _p99(c.took_s for c in round_.control if c.path == path and c.status))
        for path in paths
    ]
    if round_.control:
        found.append((UNANSWERED, float(sum(not probe.status for probe in round_.control))))
    return [*found, (CLIENT_LAG, _p99(round_.lag_s))]


def _p99(times: Iterable[float]) -> float | None:
    collected = percentiles(times)
    return None if collected is None else collected.p99


def _workload_figure(name: str) -> Figure:
    """Return the figure for a name of `measures.workload_figures`, where a last word "s" is the unit."""
    if name in HIGHER:
        return Figure(name, "part", "higher")
    if name in TOKENS:
        return Figure(name, "tokens", TOKENS[name])
    if name.endswith(" s"):
        return Figure(name.removesuffix(" s"), "s", "lower")
    return Figure(name, "" if name in COUNTS else "x", "lower")


def _order(item: tuple[Figure, object]) -> int:
    """Sort key: common figures first, in their order; then the workload's own; then those of control routes and lag."""
    figure = item[0]
    for position, common in enumerate(COMMON):
        if common.figure.name == figure.name:
            return position
    control = figure.name.startswith("/") or figure in (CLIENT_LAG, UNANSWERED)
    return len(COMMON) + (2 if figure == CLIENT_LAG else 1 if control else 0)


def figure_row(figure: Figure, names: Sequence[str], by_target: dict[str, dict[int, float]]) -> FigureRow:
    """Build a row from each target's values by round; ratios are to the first of `names`."""
    first = by_target.get(names[0], {}) if names and figure.better != "neither" else {}
    return FigureRow(
        figure=figure,
        values={name: Range(tuple(by_target[name].values())) for name in names if by_target.get(name)},
        ratios={name: Range(pairs) for name in names[1:] if (pairs := _pairs(first, by_target.get(name, {})))},
    )


def _pairs(first: dict[int, float], other: dict[int, float]) -> tuple[float, ...]:
    """Return ratios of the rounds that both have, without those of a zero in the first."""
    return tuple(other[number] / value for number, value in first.items() if number in other and value)
