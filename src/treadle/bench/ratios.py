"""Targets side by side: figures of each workload over its rounds, and ratios between rounds that ran side by side.

Rounds are interleaved (A B A B), so round k of one target is compared with round k of another: what slowed the machine
down slowed both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from .measures import Figures, Spread, figures, particular, spread
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
    """What a figure is. `unit` is "s", "tok/s", "req/s", "tokens", "part" (of 1), "x" (a ratio) or "" (a count)."""

    name: str
    unit: str
    better: Better


class Row(msgspec.Struct, frozen=True):
    """One figure of a workload. `values` has its values by target, `ratios` those of each other target divided by the
    first target's in the same round; a target that has none is left out, and figures without a better way have none."""

    figure: Figure
    values: dict[str, Range]
    ratios: dict[str, Range]


class _Common(msgspec.Struct, frozen=True):
    figure: Figure
    read: Callable[[Figures], float | None]


def _of(part: str, which: str) -> Callable[[Figures], float | None]:
    def read(seen: Figures) -> float | None:
        values: Spread | None = getattr(seen, part)
        return None if values is None else float(getattr(values, which))

    return read


def _count(outcome: str) -> Callable[[Figures], float | None]:
    return lambda seen: float(seen.answers.get(outcome, 0))


COMMON = (
    _Common(Figure("TTFT p50", "s", "lower"), _of("ttft", "p50")),
    _Common(Figure("TTFT p99", "s", "lower"), _of("ttft", "p99")),
    _Common(Figure("TTFT max", "s", "lower"), _of("ttft", "max")),
    _Common(Figure("TTFT max / median", "x", "lower"), lambda seen: seen.flatness),
    _Common(Figure("gap p50", "s", "lower"), _of("gap", "p50")),
    _Common(Figure("gap p99", "s", "lower"), _of("gap", "p99")),
    _Common(Figure("total p50", "s", "lower"), _of("total", "p50")),
    _Common(Figure("total p99", "s", "lower"), _of("total", "p99")),
    _Common(Figure("tok/s", "tok/s", "higher"), lambda seen: seen.tokens_per_s),
    _Common(Figure("tok/s a stream", "tok/s", "higher"), _of("stream_tokens_per_s", "p50")),
    _Common(Figure("goodput", "req/s", "higher"), lambda seen: seen.goodput_per_s),
    _Common(Figure("good answers", "part", "higher"), lambda seen: seen.good),
    _Common(Figure("answered", "", "neither"), _count("ok")),
    _Common(Figure("refused", "", "neither"), _count("refused")),
    _Common(Figure("failed", "", "lower"), _count("failed")),
    _Common(Figure("incomplete", "", "lower"), _count("incomplete")),
    _Common(Figure("refusal p99", "s", "lower"), _of("refusal", "p99")),
)
CLIENT_LAG = Figure("client lag p99", "s", "neither")
UNANSWERED = Figure("control looks unanswered", "", "lower")
QUIET = {"good answers": 1.0, "refused": 0.0, "failed": 0.0, "incomplete": 0.0, UNANSWERED.name: 0.0}
HIGHER = ("rate kept", "refusals with Retry-After", "prompt tokens reused")
COUNTS = ("neither answered nor refused", "still waiting at the end")
TOKENS = ("wasted tokens a cancel",)


def rows(result: Result, workload: str) -> list[Row]:
    """All figures of `workload`, in reading order; those of none of the targets are left out."""
    goodput = result.workloads[workload].goodput
    seen: dict[Figure, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for round_ in result.rounds.get(workload, []):
        for figure, value in values(workload, round_, goodput):
            seen[figure][round_.target][round_.number] = value
    names = targets(result, workload)
    return [row_of(figure, names, by_target) for figure, by_target in sorted(seen.items(), key=_place)]


def targets(result: Result, workload: str) -> list[str]:
    """The names of the targets that ran `workload`, in the order of the result."""
    ran = {round_.target for round_ in result.rounds.get(workload, [])}
    return [target.name for target in result.targets if target.name in ran]


def telling(found: Sequence[Row]) -> list[Row]:
    """The rows that say something to a reader: without those of QUIET that are as they should be in every round, and
    without a p99 that is the maximum because there were too few to tell."""
    values_of = {row.figure.name: row.values for row in found}
    return [row for row in found if not _is_silent(row, values_of)]


def _is_silent(row: Row, values_of: dict[str, dict[str, Range]]) -> bool:
    name = row.figure.name
    if name in QUIET:
        return all(value == QUIET[name] for over in row.values.values() for value in over.values)
    return name.endswith(" p99") and values_of.get(f"{name.removesuffix(' p99')} max") == row.values


def verdict(ratio: Range, better: Better) -> Verdict:
    """Whether a ratio says that the other target is better than the first. Rounds that disagree, or a median within
    2 %, say nothing."""
    if better == "neither" or abs(ratio.median - 1) < EVEN or ratio.least <= 1 <= ratio.most:
        return "even"
    return "better" if (ratio.median < 1) == (better == "lower") else "worse"


def values(workload: str, round_: Round, goodput: tuple[float, float]) -> list[tuple[Figure, float]]:
    """Every figure of one round, each once."""
    seen = figures(round_, goodput)
    found = [(common.figure, common.read(seen)) for common in COMMON]
    found += _watched(round_)
    found += [(_own(name), value) for name, value in particular(workload, round_).items()]
    once = {figure.name: (figure, value) for figure, value in reversed(found) if value is not None}
    return list(reversed(once.values()))


def _watched(round_: Round) -> list[tuple[Figure, float | None]]:
    """How the control routes answered, and how late the client itself was."""
    paths = dict.fromkeys(look.path for look in round_.control)
    found: list[tuple[Figure, float | None]] = [
        (Figure(f"{path} p99", "s", "lower"), _p99(c.took_s for c in round_.control if c.path == path and c.status))
        for path in paths
    ]
    if round_.control:
        found.append((UNANSWERED, float(sum(not look.status for look in round_.control))))
    return [*found, (CLIENT_LAG, _p99(round_.lag_s))]


def _p99(times: Iterable[float]) -> float | None:
    seen = spread(times)
    return None if seen is None else seen.p99


def _own(name: str) -> Figure:
    """The figure behind a name of `measures.particular`, where a last word "s" is the unit."""
    better: Better = "higher" if name in HIGHER else "lower"
    if name in HIGHER:
        return Figure(name, "part", better)
    if name.endswith(" s"):
        return Figure(name.removesuffix(" s"), "s", better)
    if name in COUNTS:
        return Figure(name, "", better)
    return Figure(name, "tokens" if name in TOKENS else "x", better)


def _place(item: tuple[Figure, object]) -> int:
    """Common figures first, in their order; then the workload's own; then what was watched."""
    figure = item[0]
    for place, common in enumerate(COMMON):
        if common.figure.name == figure.name:
            return place
    watched = figure.name.startswith("/") or figure in (CLIENT_LAG, UNANSWERED)
    return len(COMMON) + (2 if figure == CLIENT_LAG else 1 if watched else 0)


def row_of(figure: Figure, names: Sequence[str], by_target: dict[str, dict[int, float]]) -> Row:
    """A row from each target's values by round; the first of `names` is what the others are divided by."""
    first = by_target.get(names[0], {}) if names and figure.better != "neither" else {}
    return Row(
        figure=figure,
        values={name: Range(tuple(by_target[name].values())) for name in names if by_target.get(name)},
        ratios={name: Range(pairs) for name in names[1:] if (pairs := _pairs(first, by_target.get(name, {})))},
    )


def _pairs(first: dict[int, float], other: dict[int, float]) -> tuple[float, ...]:
    """Ratios of the rounds that both have; none where the first has nothing to divide by."""
    return tuple(other[number] / value for number, value in first.items() if number in other and value)
