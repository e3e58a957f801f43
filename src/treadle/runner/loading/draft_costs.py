"""Costs of steps that verify draft tokens, and of those that follow each other without, for the first sequences.

A scheduler corrects them by the steps that it sees, all alike. So a few steps will do, but their sizes must reach from
one sequence to the most: what is left out when the time is over costs as much as smaller ones let expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Protocol

from ...core.capabilities import StepCapabilities, StepCost
from ...core.plan import MAX_SCORED_TOKENS, Admit, DecodeRow, StepPlan, StepResult
from ..device.owner_thread import OutOfMemory
from .synthetic_steps import Clock, Warmable, decoders, release

TOKENS = 96
"""Tokens of a sequence, at most."""
BUDGET_S = 2.0
SLOW_S = 0.25
"""After a step that takes longer nothing larger is timed."""
_DRAFTS = (0, 1, 3, 7, 8)
_STEPS = 2
_APART = 4
"""Each number of sequences is so many times the one before."""
_TURNS = 3
_TRIED_DRAFTS = 3
_WORTH = 0.95
"""Graphs are used if steps take less than this part of their time without: each size of a step has graphs of its own,
which take memory."""


class _Failed(Exception):
    """A sequence failed, for lack of memory as a rule."""


Costs = tuple[tuple[StepCost, ...], tuple[StepCost, ...]]


def measure_drafts(runner: Warmable, most_rows: int, can: StepCapabilities, clock: Clock) -> Costs:
    """Return `SpeculationCapabilities.plain` and `verifying` for up to `most_rows` sequences. Leaves nothing behind."""
    end = clock() + BUDGET_S
    plain: list[StepCost] = []
    verifying: list[StepCost] = []
    rows = 1
    while not plain or (plain[-1].rows < most_rows and clock() < end and plain[-1].seconds < SLOW_S):
        decoding = _Decoding(runner, rows, clock)
        try:
            decoding.join()
            plain.append(StepCost(rows, rows, decoding.plain_s(can.lookahead)))
            verifying += decoding.verifying(can, plain[-1], end)
        except (_Failed, OutOfMemory):
            break
        finally:
            decoding.leave()
        rows = min(_APART * rows, most_rows)
    return tuple(plain), tuple(verifying)


class Launching(Warmable, Protocol):
    """A runner that verifies drafts with CUDA graphs or without."""

    verifies_in_graphs: bool


def choose_launches(runner: Launching, most_rows: int, draft_tokens: int, clock: Clock) -> str:
    """Let steps that verify drafts use CUDA graphs if these make them shorter: timed for about two seconds, in turns of
    a few steps without and with, of one sequence and of four. Return what was found, for people; graphs are not used
    where no step could be timed. Leaves nothing behind.

    A graph takes the host less than single launches, and the device begins later: which is longer depends on both.
    """
    end, least = clock() + BUDGET_S, dict[int, tuple[float, ...]]()
    turns = [1, min(_APART, most_rows)] * _TURNS
    while turns and (not least or clock() < end):
        rows = turns.pop(0)
        turn = tuple(_launched_s(runner, rows, draft_tokens, clock, graphs=graphs) for graphs in (False, True))
        if all(turn):
            least[rows] = tuple(map(min, turn, least.get(rows, turn)))
    single, shared = (sum(seconds[way] for seconds in least.values()) for way in (0, 1))
    runner.verifies_in_graphs = shared < _WORTH * single
    if not least:
        return "single launches: steps with CUDA graphs could not be timed"
    chosen = "CUDA graphs" if runner.verifies_in_graphs else "single launches"
    return f"{chosen}: with graphs a step takes {shared / single:.2f} of the time without"


def _launched_s(runner: Launching, rows: int, draft_tokens: int, clock: Clock, *, graphs: bool) -> float:
    """Seconds of a step of `rows` sequences that verify a few drafts; 0 where none did."""
    runner.verifies_in_graphs = graphs
    decoding = _Decoding(runner, rows, clock)
    try:
        decoding.join()
        return decoding.verifying_s(min(_TRIED_DRAFTS, draft_tokens)) or 0.0
    except (_Failed, OutOfMemory):
        return 0.0
    finally:
        decoding.leave()


class _Decoding:
    """`rows` sequences that decode, as a scheduler would step them."""

    def __init__(self, runner: Warmable, rows: int, clock: Clock) -> None:
        self._runner = runner
        self._rows = rows
        self._clock = clock
        self._requests = decoders(rows, TOKENS)
        self._in_flight = 0
        self._gained = dict.fromkeys((request.id for request in self._requests), 0)

    def join(self) -> None:
        """Admit the sequences, with a token each."""
        admit = tuple(Admit(request=request) for request in self._requests)
        self._take(self._runner.execute(StepPlan(step=0, admit=admit, decode=self._decode(0))))

    def leave(self) -> None:
        while self._in_flight:
            with suppress(OutOfMemory):
                self._finish()
        release(self._runner, self._requests)

    def plain_s(self, lookahead: int) -> float:
        """Seconds of the quickest of a few steps that follow each other: what a busy machine adds to others is not what
        they cost. With `lookahead` each is started before the one before is finished, and one behind a slow one looks
        quicker than it is: there the median."""
        times: list[float] = []
        while len(times) < 2 + _STEPS and not (len(times) > 1 and times[-1] - times[-2] > SLOW_S):
            while self._in_flight <= lookahead:
                self._runner.start(StepPlan(step=0, decode=self._decode(self._in_flight)))
                self._in_flight += 1
            self._take(self._finish())
            times.append(self._clock())
        while self._in_flight:
            self._take(self._finish())
        gaps = [after - before for before, after in pairwise(times)]
        return median(gaps) if lookahead else min(gaps)

    def _finish(self) -> StepResult:
        try:
            result = self._runner.finish()
        except BaseException:
            self._in_flight = 0
            raise
        self._in_flight -= 1
        return result

    def verifying(self, can: StepCapabilities, plain: StepCost, end: float) -> Iterator[StepCost]:
        """Yield the costs of steps that verify more and more drafts, until `end`; of one sequence with a draft in any
        case."""
        slow = False
        for drafts in _DRAFTS:
            tokens = self._rows * (1 + drafts)
            needed = self._rows == 1 and drafts <= 1
            if drafts > can.speculation.draft_tokens or tokens > MAX_SCORED_TOKENS:
                return
            if not needed and (slow or self._clock() >= end):
                return
            seconds = plain.seconds if not drafts and not can.lookahead else self.verifying_s(drafts)
            if seconds is not None:
                yield StepCost(self._rows, tokens, seconds)
                slow = seconds > SLOW_S

    def verifying_s(self, drafts: int) -> float | None:
        """Seconds of the quicker of two steps that verify so many drafts, behind a first one; None where none did."""
        times: list[float] = []
        for _ in range(2 * (1 + _STEPS)):
            began = self._clock()
            with self._runner.filled_drafts():
                result = self._runner.execute(StepPlan(step=0, decode=self._decode(0, drafts)))
            seconds = self._clock() - began
            self._take(result)
            if all(row.drafted == drafts for row in result.rows):  # fewer are beside tokens that are computed again
                times.append(seconds)
            if len(times) > _STEPS or (times and seconds > SLOW_S):
                break
        return min(times[1:] or times) if times else None

    def _decode(self, ahead: int, drafts: int = 0) -> tuple[DecodeRow, ...]:
        return tuple(DecodeRow(id_, gained + ahead, drafts) for id_, gained in self._gained.items())

    def _take(self, result: StepResult) -> None:
        if result.failures:
            raise _Failed
        for row in result.rows:
            self._gained[row.id] += len(row.tokens)
