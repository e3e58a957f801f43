"""The contract between the engine and whatever computes: the only thing `engine/` knows of `runner/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..core.messages import Capabilities, RunnerStatistics
from ..core.plan import StepPlan, StepResult


class RunnerBroken(Exception):
    """The runner's state can't be trusted any more (a fault of MLX's runtime): the owner must be replaced.

    Any other exception out of `execute` is taken as the fault of a row in that plan: the rows of the plan are
    released, recomputed from their tokens, and the guilty one found and failed alone.
    """


class JobContext(Protocol):
    """What a job gets to know of its caller."""

    def cancelled(self) -> bool:
        """True once the caller no longer wants the result. Long jobs ask between chunks."""
        ...


Job = Callable[[JobContext, Mapping[str, Any]], Any]
Progress = Callable[[str], None]


class Runner(Protocol):
    """Computes steps. It lives and dies on the owner: built, used and closed by one thread."""

    def capabilities(self) -> Capabilities:
        """What this runner can do."""
        ...

    def warm_up(self) -> None:
        """Run every kind of step once and leave nothing behind, also when it raises (C2)."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the plan's work. `plan.release` was already passed to `release` and is not looked at here.

        Raises RunnerBroken when nothing can be trusted any more; any other exception fails this plan's rows only.
        """
        ...

    def release(self, row_id: str) -> None:
        """Forget one row, wherever it stands. An unknown id is harmless."""
        ...

    def statistics(self) -> RunnerStatistics:
        """Memory in use; cheap enough for every step."""
        ...

    def jobs(self) -> Mapping[str, Job]:
        """The named pieces of work that may be run between steps."""
        ...

    def close(self) -> None:
        """Free everything. Nothing is called after it."""
        ...


RunnerFactory = Callable[[Progress], Runner]
"""Builds a runner on the calling thread, which becomes its owner; reports stages for people on the way."""
