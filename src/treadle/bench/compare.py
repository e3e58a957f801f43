"""Comparison of two runs of the same load on the same machine with limits to worsening. For use in CI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from . import ratios
from .errors import BenchError
from .ratios import Figure, Range
from .samples import Result

TOLERATED: dict[str, float] = {
    "TTFT p50": 1.10,
    "TTFT p99": 1.25,
    "gap p50": 1.10,
    "gap p99": 1.25,
    "total p50": 1.10,
    "tok/s": 1.10,
    "goodput": 1.10,
    "failed": 1.0,
    "incomplete": 1.0,
    "valid answers": 1.0,
    "valid calls": 1.0,
    "neither answered nor refused": 1.0,
    "control looks unanswered": 1.0,
}
NOISE_S = 0.00025


class FigureCheck(msgspec.Struct, frozen=True):
    """One figure of one target in both runs: medians over the rounds; for counts the mean a round, so that one bad
    round is not lost. `ratio` is the factor of worsening of `b`, in either direction of the figure: above 1 is worse.
    It is None for an unlimited worsening (from 0), and if one run lacks the figure. `limit` is the largest `ratio`
    tolerated; None if the figure is not judged."""

    workload: str
    target: str
    figure: Figure
    a: float | None
    b: float | None
    ratio: float | None
    limit: float | None
    passed: bool


class Comparison(msgspec.Struct, frozen=True):
    """All checks. `notes` are remarks for the reader: targets left out, other models or versions, a run that ended
    early."""

    checks: list[FigureCheck]
    notes: list[str]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def compare(a: Result, b: Result, thresholds: Mapping[str, float] | None = None) -> Comparison:
    """Compare run `b` with the earlier run `a`. `thresholds`, from a figure's name to the largest worsening tolerated
    as a ratio (1.1: a tenth worse), override TOLERATED. A time that moved by less than NOISE_S passes. Raises
    BenchError for empty or incomparable runs, and for thresholds that are below 1 or name no figure."""
    _refuse_unlike(a, b)
    pairs, notes = _pairs(a, b)
    limits = TOLERATED | dict(thresholds or {})
    runs = {"first": a, "second": b}
    notes += [f"the {which} run ended early: {run.stopped}" for which, run in runs.items() if run.stopped]
    checks = [check for workload in a.workloads for check in _checks(a, b, workload, pairs, limits)]
    if not any(check.limit for check in checks):
        raise BenchError("there is nothing to compare: no round in either run. Run the benchmark again")
    _refuse_unknown(thresholds or {}, {check.figure.name for check in checks})
    return Comparison(checks, notes)


# Conditions that must be the same ------------------------------------------------------------------------------------


def _refuse_unlike(a: Result, b: Result) -> None:
    unlike = [*_unlike_machines(a, b), *_unlike_workloads(a, b)]
    if unlike:
        raise BenchError(
            f"the two runs can't be compared: {'; '.join(unlike)}. "
            "Run both with the same workloads, seed and options, on the same machine"
        )


def _unlike_machines(a: Result, b: Result) -> Iterator[str]:
    yield from _unlike("endpoint", a.endpoint, b.endpoint)
    for part in ("processor", "cores", "accelerator"):
        yield from _unlike(part, getattr(a.machine, part), getattr(b.machine, part))


def _unlike_workloads(a: Result, b: Result) -> Iterator[str]:
    yield from (f"workload '{name}' is only in the first" for name in a.workloads if name not in b.workloads)
    yield from (f"workload '{name}' is only in the second" for name in b.workloads if name not in a.workloads)
    for name, info in a.workloads.items():
        if name in b.workloads:
            yield from _unlike_loads(name, msgspec.to_builtins(info), msgspec.to_builtins(b.workloads[name]))


def _unlike_loads(name: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """List the differences of a workload; its digest only if nothing else explains it."""
    found = [
        text
        for part in ("seed", "requests", "concurrency", "goodput")
        for text in _unlike(f"{part} of '{name}'", a[part], b[part])
    ]
    for key in a["options"] | b["options"]:
        found += _unlike(f"option {key} of '{name}'", a["options"].get(key), b["options"].get(key))
    return found or list(_unlike(f"digest of '{name}'", a["digest"], b["digest"]))


def _unlike(label: str, a: object, b: object) -> Iterator[str]:
    if a != b:
        yield f"{label} {_format(a)} and {_format(b)}"


def _format(value: object) -> str:
    if value is None or value == "":
        return "none"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _refuse_unknown(thresholds: Mapping[str, float], present: set[str]) -> None:
    known = present | TOLERATED.keys() | {common.figure.name for common in ratios.COMMON}
    for name, limit in thresholds.items():
        if name not in known:
            raise BenchError(f"there is no figure '{name}' in these runs: use one of {', '.join(sorted(known))}")
        if not limit >= 1:
            raise BenchError(f"the threshold {name}={limit:g} must be at least 1: 1.1 tolerates a tenth worse")


# Figures -------------------------------------------------------------------------------------------------------------


def _pairs(a: Result, b: Result) -> tuple[list[tuple[str, str]], list[str]]:
    """Pair the targets of the same name, or the only one of each; and note unpaired targets and other models."""
    first, second = {t.name: t for t in a.targets}, {t.name: t for t in b.targets}
    if len(first) == len(second) == 1:
        pairs = [(next(iter(first)), next(iter(second)))]
    else:
        pairs = [(name, name) for name in first if name in second]
    if not pairs:
        raise BenchError(
            f"the two runs have no target in common ({', '.join(first)}; {', '.join(second)}): "
            "give the targets the same names, or run one each"
        )
    notes = [f"{x} is called {y} in the second run" for x, y in pairs if x != y]
    notes += [f"{x} serves {p} and {q}" for x, y in pairs if (p := first[x].model) != (q := second[y].model)]
    notes += [f"{x} is {p} and {q}" for x, y in pairs if (p := first[x].version) != (q := second[y].version)]
    notes += [f"{name} is only in the first run" for name in first if name not in {x for x, _ in pairs}]
    notes += [f"{name} is only in the second run" for name in second if name not in {y for _, y in pairs}]
    return pairs, notes


def _checks(
    a: Result, b: Result, workload: str, pairs: list[tuple[str, str]], limits: Mapping[str, float]
) -> Iterator[FigureCheck]:
    first = {row.figure: row.values for row in ratios.rows(a, workload)}
    second = {row.figure: row.values for row in ratios.rows(b, workload)}
    for x, y in pairs:
        for figure in first | second:
            before, now = first.get(figure, {}).get(x), second.get(figure, {}).get(y)
            if before is not None or now is not None:
                yield _check(workload, x, figure, before, now, limits.get(figure.name))


def _check(
    workload: str, target: str, figure: Figure, before: Range | None, now: Range | None, limit: float | None
) -> FigureCheck:
    a, b = _middle(figure, before), _middle(figure, now)
    if a is None or b is None:
        return FigureCheck(workload, target, figure, a, b, None, limit, passed=limit is None or b is not None)
    ratio = _worsening(figure, a, b)
    passed = limit is None or _within_noise(figure, a, b) or (ratio is not None and ratio <= limit)
    return FigureCheck(workload, target, figure, a, b, ratio, limit, passed)


def _middle(figure: Figure, over: Range | None) -> float | None:
    if over is None:
        return None
    return over.median if figure.unit else over.mean


def _worsening(figure: Figure, a: float, b: float) -> float | None:
    if figure.better == "higher":
        a, b = b, a
    if a == b:
        return 1.0
    return b / a if a else None


def _within_noise(figure: Figure, a: float, b: float) -> bool:
    return figure.unit == "s" and abs(b - a) < NOISE_S
