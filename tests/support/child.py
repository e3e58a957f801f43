"""Owners for the engine's child process, with faults by plain arguments: `tests.support.child:entry`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.support.faults import Faults, FaultyRunner, die, hang
from tests.support.poison import Poison
from treadle.core.plan import StepPlan
from treadle.engine.owner import OwnerLimits
from treadle.errors import ModelError
from treadle.runner.base import Progress, Runner, RunnerBroken, RunnerFactory

ENTRY = "tests.support.child:entry"


def entry(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """Return a runner factory with faults, by argument:

    `entry`, `construct`, `warm_up`, `capabilities`: a message to raise there. `unplain`: capabilities that can't be
    sent. `popen`: capabilities that list the sockets which a process started here would inherit. At step `at` (1):
    `signal` kills it so, `broken`, `exit`, or `hang_in` "step"; `hang_in` may be "build" or "close" too. `once`: a
    file; only the owner that creates it has the fault. `poison`: arguments of a `Poison`. `after`: a file; the owner
    that creates it is built, all later ones are not. `closed`: a file that `close` writes.
    """
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
        errors: dict[str, Any] = {
            stage: ModelError(self.arguments[stage])
            for stage in ("construct", "warm_up", "capabilities")
            if stage in self.arguments
        }
        self.poison = Poison(**arguments["poison"]) if "poison" in arguments else None
        super().__init__(Faults(before_step=self._before, **errors), can=self.arguments.get("can"))
        if self.arguments.get("popen"):
            self._can = msgspec.structs.replace(self._can, details={"inheritable": str(_inheritable())})
        if self.arguments.get("unplain"):
            self._can = msgspec.structs.replace(self._can, model=object())

    def start(self, plan: StepPlan) -> None:
        if self.poison is not None:
            self.poison.taste(plan)
        super().start(plan)

    def _before(self, step: int) -> None:
        fault = self.arguments
        if step < fault.get("at", 1):
            return
        if "signal" in fault:
            die(fault["signal"])
        if fault.get("hang_in") == "step":
            print("hanging in a step", file=sys.stderr, flush=True)
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


def _inheritable() -> list[int]:
    """Return the sockets of this process that a forked one would keep open after `exec`."""
    found = []
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and os.get_inheritable(fd):
                found.append(fd)
        except OSError:
            continue
    return found
