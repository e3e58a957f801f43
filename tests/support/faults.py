"""Scripted runner with faults: it raises, blocks or dies on demand, and records its callers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.capabilities import capabilities
from tests.support.scripted import ScriptedRunner
from treadle.core.capabilities import Capabilities
from treadle.core.messages import Submit
from treadle.core.plan import StepPlan, StepResult
from treadle.runner.base import Job, JobContext, Progress, Runner, RunnerBroken, RunnerFactory

VOCABULARY = 1000
WAIT_S = 60.0


def plain(request: Submit, position: int) -> int:
    """Script of these tests: the token depends on the prompt and the position alone."""
    return (sum(request.prompt) + 7 * position) % VOCABULARY


class Gate:
    """Barrier that holds its callers: the test waits until it is `reached`, then calls `open`."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def hold(self) -> None:
        self._reached.set()
        assert self._open.wait(WAIT_S), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()

    def wait_reached(self) -> None:
        assert self._reached.wait(WAIT_S), "nobody came to the gate"


@dataclass
class Faults:
    """Faults of a runner. Steps, and calls of `finish`, count from 1 over the runner's life."""

    construct: BaseException | None = None
    warm_up: BaseException | None = None
    capabilities: BaseException | None = None
    close: BaseException | None = None
    steps: dict[int, BaseException] = field(default_factory=dict)
    finishes: dict[int, BaseException] = field(default_factory=dict)
    always: BaseException | None = None
    on_row: Callable[[str], BaseException | None] = lambda row_id: None
    on_release: Callable[[str], BaseException | None] = lambda row_id: None
    before_step: Callable[[int], None] = lambda step: None
    jobs: Mapping[str, Job] = field(default_factory=dict)


class FaultyRunner(ScriptedRunner):
    """Runner with `Faults`. `threads` are the names of all threads that called it; `max_concurrent` the most at a
    time."""

    def __init__(self, faults: Faults | None = None, *, can: Mapping[str, Any] | None = None) -> None:
        super().__init__(plain, vocabulary=VOCABULARY)
        self.faults = faults or Faults()
        self.threads: list[tuple[str, int]] = [("build", threading.get_ident())]
        self.released: list[str] = []
        self.steps = 0
        self.finished = 0
        self.closed = 0
        self.max_concurrent = 0
        self._inside = 0
        self._count = threading.Lock()
        self._can = capabilities(**{**_CAN, **(can or {})})
        _raise(self.faults.construct)

    @contextmanager
    def called(self, name: str) -> Iterator[None]:
        with self._count:
            self.threads.append((name, threading.get_ident()))
            self._inside += 1
            self.max_concurrent = max(self.max_concurrent, self._inside)
        try:
            yield
        finally:
            with self._count:
                self._inside -= 1

    def capabilities(self) -> Capabilities:
        _raise(self.faults.capabilities)
        return self._can

    def warm_up(self) -> None:
        with self.called("warm_up"):
            _raise(self.faults.warm_up)

    def execute(self, plan: StepPlan) -> StepResult:
        with self.called("execute"):
            self.steps += 1
            self.faults.before_step(self.steps)
            _raise(self.faults.always)
            _raise(self.faults.steps.get(self.steps))
            for row_id in _rows(plan):
                _raise(self.faults.on_row(row_id))
            return super().execute(plan)

    def finish(self) -> StepResult:
        with self.called("finish"):
            self.finished += 1
            if (error := self.faults.finishes.get(self.finished)) is not None:
                self.void()
                raise error
            return super().finish()

    def release(self, row_id: str) -> None:
        with self.called("release"):
            _raise(self.faults.on_release(row_id))
            self.released.append(row_id)
            super().release(row_id)

    def jobs(self) -> Mapping[str, Job]:
        return {"echo": self._echo, "raise": self._raise, "break": self._break, "odd": self._odd, **self.faults.jobs}

    def close(self) -> None:
        with self.called("close"):
            self.closed += 1
            super().close()
            _raise(self.faults.close)

    def _echo(self, context: JobContext, args: Mapping[str, Any]) -> Any:
        with self.called("job"):
            return dict(args)

    def _raise(self, context: JobContext, args: Mapping[str, Any]) -> Any:
        raise ValueError("the job's fault")

    def _break(self, context: JobContext, args: Mapping[str, Any]) -> Any:
        raise RunnerBroken("broken in a job")

    def _odd(self, context: JobContext, args: Mapping[str, Any]) -> Any:
        return object()


_CAN: dict[str, Any] = {
    "model": "scripted",
    "architecture": "none",
    "vocabulary": VOCABULARY,
    "context": 4096,
    "device": "cpu",
    "dtype": "float32",
}


def builds(runner: Runner | None = None, **faults: Any) -> RunnerFactory:
    """Return a factory of `runner`, or of a new faulty one each time."""

    def build(progress: Progress) -> Runner:
        progress("loading the script")
        return runner if runner is not None else FaultyRunner(Faults(**faults))

    return build


def hang() -> None:
    """Never return."""
    while True:
        threading.Event().wait()


def die(signal: int) -> None:
    os.kill(os.getpid(), signal)
    hang()


def _rows(plan: StepPlan) -> list[str]:
    """Return each row that takes part in `plan`, once."""
    rows = (*(a.request.id for a in plan.admit), *(c.id for c in plan.prefill), *(d.id for d in plan.decode))
    return list(dict.fromkeys(rows))


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
