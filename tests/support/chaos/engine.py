"""Engine process with faults: the real runner, in which steps fail by the orders in the file `ORDER`.

The folder is in the environment variable CHAOS_ORDERS. An order is one JSON object: `kind`, one of `StepFault`, and the
number of `steps`. It is taken by the first step that finds it. Rows whose prompt begins with RAISES or KILLS fail each
step, or the process, whenever they take part in one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from treadle.compose.owner import owner_of
from treadle.engine.owner import OwnerLimits
from treadle.runner.base import Progress, Runner, RunnerFactory

FOLDER = "CHAOS_ORDERS"
ORDER = "order.json"
MARK = "chaos: "
RAISES = (7, 7, 7, 7)
KILLS = (7, 7, 7, 8)
SLOW_STEP_S = 0.2
BABBLE_BYTES = 256 * 1024


class StepFault(StrEnum):
    """Effect of an order on the step that takes it."""

    RAISE = "raise"  # before the step is computed
    RAISE_READ = "raise_read"  # when its result is read
    RAISE_PLAN = "raise_plan"  # when the next step is planned
    RAISE_RELEASE = "raise_release"  # when a row is released
    ALLOCATE = "allocate"  # MLX finds no memory
    MEMORY = "memory"  # Python finds none
    STARVE = "starve"  # the kernel gives none
    BROKEN = "broken"  # MLX's runtime fails
    SLOW = "slow"
    HANG = "hang"
    ABORT = "abort"
    SEGV = "segv"
    BABBLE = "babble"  # a native library fills standard error


def give_order(folder: Path, kind: StepFault, steps: int = 1) -> None:
    """Make the next `steps` steps fail."""
    draft = folder / f"{ORDER}.new"
    draft.write_text(json.dumps({"kind": kind, "steps": steps}))
    draft.rename(folder / ORDER)


def entry(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """Return the engine's entry of `treadle serve`, with a runner that takes orders once it is warm."""
    factory, limits = owner_of(arguments)

    def build(progress: Progress) -> Runner:
        runner = factory(progress)
        warm_up = runner.warm_up

        def and_arm() -> None:
            warm_up()
            Orders(runner, Path(os.environ[FOLDER]))

        runner.warm_up = and_arm  # type: ignore[method-assign]
        return runner

    return build, limits


class Orders:
    """Wrapper of the parts of a runner in which faults happen, so that the runner's own recovery runs."""

    def __init__(self, runner: Any, folder: Path) -> None:
        self._path = folder / ORDER
        self._kind: StepFault | None = None
        self._steps = 0
        launch, read, backend = runner._launch, runner._read, runner._backend

        def launched(step: Any, before: Any) -> None:
            self._look()
            _fail_marked(row.request.prompt for row in step.rows.values())
            self._fail(_IN_LAUNCH)
            launch(step, before)

        def read_back(step: Any) -> Any:
            self._fail({StepFault.RAISE_READ: _raise})
            return read(step)

        runner._launch, runner._read = launched, read_back
        _wrap(backend, "compute", lambda: self._fail(_IN_MLX))
        _wrap(runner, "free_blocks", lambda: self._fail({StepFault.RAISE_PLAN: _raise}))
        _wrap(runner, "release", lambda: self._fail({StepFault.RAISE_RELEASE: _raise}))

    def _look(self) -> None:
        """Take an order, if there is one."""
        if self._kind is None and self._path.exists():
            with contextlib.suppress(FileNotFoundError):
                order = json.loads(self._path.read_text())
                self._path.unlink()
                self._kind, self._steps = StepFault(order["kind"]), order["steps"]

    def _fail(self, here: Mapping[StepFault, Callable[[], None]]) -> None:
        if self._kind is None or self._kind not in here:
            return
        fault = here[self._kind]
        self._steps -= 1
        if self._steps <= 0:
            self._kind = None
        fault()


def _wrap(owner: Any, name: str, before: Callable[[], None]) -> None:
    """Call `before` at each call of the method."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def _fail_marked(prompts: Any) -> None:
    for prompt in prompts:
        if prompt[: len(RAISES)] == RAISES:
            raise ValueError(MARK + "a row that always raises")
        if prompt[: len(KILLS)] == KILLS:
            os.abort()


def _raise() -> None:
    raise ValueError(MARK + "a step raised")


def _no_memory() -> None:
    raise RuntimeError("[malloc] Unable to allocate 1 bytes (chaos: no memory)")


def _no_python_memory() -> None:
    raise MemoryError(MARK + "no memory")


def _starve() -> None:
    """Deny this process more memory for a second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    threading.Timer(1.0, resource.setrlimit, (resource.RLIMIT_AS, (soft, hard))).start()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))


def _broken() -> None:
    raise RuntimeError(MARK + "the device is lost")


def _hang() -> None:
    while True:
        time.sleep(60)


def _segv() -> None:
    ctypes.string_at(0)


def _babble() -> None:
    os.write(sys.stderr.fileno(), (b"chaos: " + b"x" * 120 + b"\n") * (BABBLE_BYTES // 128))


_IN_LAUNCH: Mapping[StepFault, Callable[[], None]] = {
    StepFault.RAISE: _raise,
    StepFault.SLOW: lambda: time.sleep(SLOW_STEP_S),
    StepFault.HANG: _hang,
    StepFault.ABORT: os.abort,
    StepFault.SEGV: _segv,
    StepFault.BABBLE: _babble,
    StepFault.STARVE: _starve,
}
_IN_MLX: Mapping[StepFault, Callable[[], None]] = {
    StepFault.ALLOCATE: _no_memory,
    StepFault.MEMORY: _no_python_memory,
    StepFault.BROKEN: _broken,
}
