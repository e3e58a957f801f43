"""Report of a run in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .points import Problem
from .run import Chaos

MAX_LISTED = 12


def report(chaos: Chaos, took_s: float, replay: str) -> str:
    """Format the figures of a run, its problems by kind, and the command that replays the first of them."""
    return "\n".join([*_figures(chaos, took_s), *_problems(chaos.problems, replay)])


def _figures(chaos: Chaos, took_s: float) -> Iterator[str]:
    rate = chaos.requests / took_s if took_s else 0.0
    yield f"seed {chaos.plan.seed}: {chaos.requests:,} requests in {took_s:.0f} s ({rate:.0f} a second)"
    yield f"  ends     {_counted(chaos.ends)}"
    yield f"  clients  {_counted(chaos.manners)}"
    spared = f", {chaos.attack.spared} spared, as too many came at once" if chaos.attack.spared else ""
    yield f"  faults   {_counted(chaos.faults)}; {chaos.attack.deaths} deaths of the engine{spared}"
    excused = "no error" if chaos.attack.survives_death else "engine_died"
    yield f"           a death of the engine excuses {excused}"
    yield f"  answers  {chaos.oracle.judged:,} choices judged by the calm run, {chaos.tokens:,} tokens"
    yield f"           {chaos.forks} differed within rounding: a calm server gives them too"
    yield f"  servers  {chaos.server.starts} started, {len(chaos.quiet)} quiet points"
    for one in chaos.drifts():
        yield f"  drift    {one}" + ("  BAD" if one.bad else "")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "none"


def _problems(problems: Sequence[Problem], replay: str) -> Iterator[str]:
    if not problems:
        yield "no problems"
        return
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem)
    yield f"{len(problems)} PROBLEMS of {len(kinds)} kinds"
    for found in sorted(kinds.values(), key=len, reverse=True)[: MAX_LISTED * 3]:
        segments = sorted({problem.segment for problem in found})
        yield f"  {len(found)} x {found[0].what}"
        first = f"first in request {found[0].request}: {replay} --only {segments[0]}"
        yield f"      segments {segments[:MAX_LISTED]}, {first}"
