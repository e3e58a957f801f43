"""R8: figures of a run of `benchmarks/chaos.py` or `benchmarks/soak.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.chaos.drift import LEAST_POINTS, NOT_JUDGED, Drift

from .figures import Figure, counted

if TYPE_CHECKING:
    from tests.support.chaos.run import Chaos


def figures(chaos: Chaos, took_s: float, run: str = "chaos") -> list[Figure]:
    """Return the run's figures; `problems` counts all faults found, a drift beyond the bound included."""
    found = _figures(chaos, took_s)
    return [Figure(f"{run}: {figure.what}", figure.value, figure.met) for figure in found]


def _figures(chaos: Chaos, took_s: float) -> list[Figure]:
    problems = ", ".join(sorted({problem.kind for problem in chaos.problems}))
    return [
        Figure("requests over HTTP and gRPC", f"{chaos.requests:,} in {took_s / 60:.0f} min"),
        Figure("how they ended", counted(chaos.ends)),
        Figure("faults", counted(chaos.faults)),
        Figure("deaths of the engine", f"{chaos.attack.deaths}"),
        Figure("answers compared with a calm run, within rounding", f"{chaos.oracle.judged:,}, {chaos.forks}"),
        Figure(
            "problems (ends, tokens, places, health, log)",
            f"{len(chaos.problems)} {problems}".strip(),
            not chaos.problems,
        ),
        *(drifted(one) for one in chaos.drifts() if not one.name.endswith(NOT_JUDGED)),
    ]


def drifted(one: Drift) -> Figure:
    """Return medians over the first and the second half of the quiet points; memory in MB."""
    unit = 1e6 if one.name.endswith("rss") else 1
    value = f"{one.before / unit:,.0f}, {one.after / unit:,.0f} ({one.part:+.1%} over {one.points} quiet points)"
    return Figure(f"{one.name}, first and second half", value, not one.bad if one.points >= LEAST_POINTS else None)
