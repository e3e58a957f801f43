"""Server whose engine dies of a token: `python -m tests.support.poison serve MODEL ...`.

The environment variable TREADLE_TEST_POISON holds, as JSON, the arguments of `Poison`. The engine is the real one, with
a wrapper around its runner.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.faults import die, hang
from treadle.compose import engine, owner
from treadle.core.plan import StepPlan
from treadle.engine.owner import OwnerLimits
from treadle.runner.base import Progress, RunnerBroken, RunnerFactory

ENTRY = "tests.support.poison:owner_of"
VARIABLE = "TREADLE_TEST_POISON"


@dataclass
class Poison:
    """A row whose prompt holds `token` is deadly in the step that samples its token number `at` (0: in its first step);
    with `beside` only while another row is in the step. `how`: a signal's name, "hang", "broken" (the runner's state is
    lost) or "raise" (an exception that may be any row's fault). `since_joined`: `at` counts from its last admission, so
    that a replay does not get there at once."""

    token: int
    at: int = 0
    how: str = "SIGABRT"
    beside: bool = False
    since_joined: bool = False
    _deadly: dict[str, int] = field(default_factory=dict)

    def taste(self, plan: StepPlan) -> None:
        """Die of `plan`, if it holds poison."""
        for admit in plan.admit:
            if self.token in admit.request.prompt:
                joined = len(admit.history) if self.since_joined else 0
                self._deadly[admit.request.id] = joined + self.at
        rows = {chunk.id for chunk in plan.prefill} | {row.id for row in plan.decode}
        positions = {row.id: row.position for row in plan.decode}
        for row_id, at in self._deadly.items():
            due = positions.get(row_id, -1) >= at or (self.at == 0 and row_id in rows)
            if due and (len(rows) > 1 or not self.beside):
                self._strike()

    def _strike(self) -> None:
        match self.how:
            case "hang":
                hang()
            case "broken":
                raise RunnerBroken("[metal::malloc] the device is lost")
            case "raise":
                raise ValueError("poison")
            case name:
                die(signal.Signals[name])


class Poisoned:
    """Wrapper of `runner` that checks every plan for poison."""

    def __init__(self, runner: Any, poison: Poison) -> None:
        self._runner = runner
        self._poison = poison

    def start(self, plan: StepPlan) -> None:
        self._poison.taste(plan)
        self._runner.start(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def owner_of(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """Return the owner of `treadle serve`, poisoned."""
    build, limits = owner.owner_of(arguments)
    poison = Poison(**json.loads(os.environ[VARIABLE]))

    def poisoned(progress: Progress) -> Any:
        return Poisoned(build(progress), poison)

    return poisoned, limits


if __name__ == "__main__":
    from treadle.cli import main

    engine.OWNER_ENTRY = ENTRY
    main()
