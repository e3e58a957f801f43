"""Owners for the engine's child process, with faults by plain arguments: `tests.support.child:entry`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.faults import Faults, FaultyRunner, die, hang
from treadle.engine.owner import OwnerLimits
from treadle.errors import ModelError
from treadle.runner.base import Progress, Runner, RunnerBroken, RunnerFactory

ENTRY = "tests.support.child:entry"


def entry(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """`construct`, `warm_up`, `capabilities`: a message to raise there. `hang_in`: "build", "step" or "close".
    `signal` is raised, `hang`, `broken` happens, at step `at` (1 by default). `once`: a file; the fault happens only in the
    owner that creates it. `after`: a file; owners fail to build once it exists, and the first creates it. `closed`: a
    file that `close` writes. `exit`: raise SystemExit at the step."""
    if message := arguments.get("entry"):
        raise ModelError(message)
    fault = _active(arguments.get("once"))

    def build(progress: Progress) -> Runner:
        progress("loading the script")
        if fault and arguments.get("hang_in") == "build":
            hang()
        if arguments.get("after") and not _active(arguments["after"]):
            raise ModelError("the model is gone")
        return _Runner(arguments, fault)

    return build, OwnerLimits(max_running=int(arguments.get("max_running", 4)), prefill_tokens=4096)


class _Runner(FaultyRunner):
    def __init__(self, arguments: Mapping[str, Any], fault: bool) -> None:
        self.arguments = arguments if fault else {}
        self.marker = arguments.get("closed")
        errors = {
            where: ModelError(self.arguments[where])
            for where in ("construct", "warm_up", "capabilities")
            if where in self.arguments
        }
        super().__init__(Faults(before_step=self._before, **errors), can=self.arguments.get("can"))
        if self.arguments.get("unplain"):
            self._can = object()  # type: ignore[assignment]

    def _before(self, step: int) -> None:
        fault = self.arguments
        if step < fault.get("at", 1):
            return
        if "signal" in fault:
            die(fault["signal"])
        if fault.get("hang_in") == "step":
            hang()
        if fault.get("broken"):
            raise RunnerBroken("the device is lost")
        if fault.get("exit"):
            raise SystemExit(9)

    def close(self) -> None:
        super().close()
        if self.marker:
            Path(self.marker).touch()
        if self.arguments.get("hang_in") == "close":
            hang()


def _active(once: str | None) -> bool:
    """Whether this owner is the one that has the fault."""
    if once is None:
        return True
    try:
        Path(once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
