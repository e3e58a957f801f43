"""Many cases of one kind, until a number of them or a time is over."""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.poison.fuzz import files, wires

CASE_S = 60.0
LIMITED_S = 5.0
AT_ONCE = 300
"""Cases of one child process, so that what a case leaves behind does not add up."""
ROOT = Path(__file__).resolve().parents[3]
ENDED_BY_LIMITS = (-signal.SIGKILL, -signal.SIGXCPU)


@dataclass
class Run:
    """What came of the cases of one kind: how many had each outcome, and what was wrong, by case."""

    kind: str
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: dict[int, str] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        return self.outcomes.total()

    def note(self, number: int, outcome: str) -> None:
        kind, _, text = outcome.partition(": ")
        self.outcomes[kind] += 1
        if kind == "wrong":
            self.wrong[number] = text

    def __str__(self) -> str:
        found = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        lines = [f"{self.kind}: {self.cases} cases of seed {self.seed}: {found}"]
        return "\n".join([*lines, *(f"  --seed {self.seed} --case {n}: {text}" for n, text in self.wrong.items())])


def over_wires(kind: str, target: wires.Target, seed: int, numbers: Iterator[int], end: float) -> Run:
    """Send the cases `numbers` until `end` of time.monotonic()."""
    run = Run(kind, seed)
    for number in numbers:
        if time.monotonic() >= end:
            break
        case = wires.KINDS[kind](random.Random(f"{kind}:{seed}:{number}"))
        try:
            text = case(target)
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
        run.note(number, f"wrong: {text}" if text else "ok")
    return run


def over_files(kind: str, seed: int, first: int, count: int, end: float) -> Run:
    """Read the cases from `first` on, in child processes, until `end` of time.monotonic()."""
    run, number, last = Run(kind, seed), first, first + count
    while number < last and time.monotonic() < end:
        number = _one_child(run, number, min(AT_ONCE, last - number), end)
    return run


def _one_child(run: Run, first: int, count: int, end: float) -> int:
    """The first case that is left to do."""
    command = [sys.executable, "-m", "tests.poison.fuzz.child", run.kind, *map(str, (run.seed, first, count))]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        number, running = first, False
        try:
            for line in _lines(child, LIMITED_S if run.kind in files.LIMITED else CASE_S):
                event, _, rest = line.partition(" ")
                running = event == "begin"
                if event == "end":
                    at, _, outcome = rest.partition(" ")
                    run.note(int(at), outcome)
                    number = int(at) + 1
                if time.monotonic() >= end:
                    return number
        finally:
            child.kill()
    if running:
        run.note(number, _ended(run.kind, child.returncode))
        return number + 1
    if number == first:
        raise RuntimeError(f"no case of {run.kind} was read: {' '.join(command)}")
    return number


def _ended(kind: str, code: int) -> str:
    """A child that was killed for its time, or has ended by itself."""
    if code in ENDED_BY_LIMITS:
        return "limit" if kind in files.LIMITED else f"wrong: not over after {CASE_S:g} s"
    return f"wrong: the process ended with {code}"


def _lines(child: subprocess.Popen[bytes], within_s: float) -> Iterator[str]:
    """The child's lines, until its end or until none comes for so long."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        data = b""
        while selector.select(within_s):
            part = os.read(child.stdout.fileno(), 65536)
            if not part:
                return
            *lines, data = (data + part).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
