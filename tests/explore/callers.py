"""Scenarios, and the clients in them as a front sees them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.core.drive import Shape, expected
from treadle.core import block_budget
from treadle.core.messages import FinishReason
from treadle.engine.client import EngineClient
from treadle.engine.generation import Generation
from treadle.engine.reservation import Reservation
from treadle.errors import (
    Busy,
    TreadleError,
)

from .owner import require

MAX_WAIT_S = 3.0
HANG_AFTER_S = 10.0
START_TIMEOUT_S = 20.0
WAITS_S = {"short": 4.0, "long": 14.0}
"""The short one is over `MAX_WAIT_S` and below `HANG_AFTER_S`, with all slacks; the long one over both."""
WAIT_SLACK_S = 3.0
DEATHS = {"die": "killed by SIGKILL", "crash": "killed by SIGSEGV"}
CONTEXT = 64
PLAIN = Shape()
REPLAYS = hasattr(EngineClient, "on_death")
"""Whether what ran when an engine died goes on with the next one."""


class NotEnabled(Exception):
    """The action is not possible now."""


@dataclass(frozen=True)
class Ask:
    """One client request: `rows` sequences of `prompt` tokens, of which each gains `tokens`. `grammar` must be compiled
    before it runs."""

    name: str
    rows: int = 1
    prompt: int = 3
    tokens: int = 2
    poison: bool = False
    grammar: str = ""

    @property
    def labels(self) -> list[str]:
        return [f"{self.name}.{i}" for i in range(self.rows)]

    def tokens_of(self, row: int) -> tuple[int, ...]:
        """The prompt of one row."""
        first = sum(map(ord, self.name)) + 10 * row
        return tuple(range(first, first + self.prompt))


@dataclass(frozen=True)
class Scenario:
    """Who asks, what the server has, and how often each trouble may come: `budget` by the first word of the action.

    `turns`: single turns of the event loop are actions of their own. `frozen_ends`: this process may also stand still
    while an owner ends. `growth`: tokens that the scheduler keeps room for of each row. `deaths_end`: a death of the
    engine may end requests that ran; else those are taken up by the next one.
    """

    name: str
    asks: tuple[Ask, ...]
    slots: int = 1
    waiting: int = 2
    shape: Shape = PLAIN
    thread: bool = False
    turns: bool = False
    frozen_ends: bool = False
    growth: int = block_budget.EXPECTED_TOKENS
    deaths_end: bool = not REPLAYS
    budget: Mapping[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Caller:
    """One client request's life as the front sees it."""

    ask: Ask
    reservation: Reservation | None = None
    refused: str = ""
    reserved: float = 0.0
    submitted_at: float = 0.0
    frozen: bool = False  # this process stood still since
    submitted: bool = False
    left: bool = False
    generations: dict[str, Generation] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    taken_back: set[str] = field(default_factory=set)

    async def read(self, label: str, generation: Generation) -> None:
        try:
            await generation.admitted()
            if label not in self.taken_back:
                self._waited(label, asyncio.get_running_loop().time(), None)
            deltas = aiter(generation)
            while True:
                self.hear(label, await anext(deltas))
        except StopAsyncIteration:
            require(self.ends.get(label) == "done", f"{label}: its deltas end without a finish")
        except TreadleError as error:
            require(label not in self.ends, f"{label} ends twice: {self.ends.get(label)}, {error}")
            self.ends[label] = type(error).__name__
            if not _has_begun(generation) and label not in self.taken_back:
                self._waited(label, asyncio.get_running_loop().time(), error)

    def _waited(self, label: str, now: float, error: TreadleError | None) -> None:
        """A wait ends in time, without success not before it may; none of a group that has begun."""
        others = [generation for other, generation in self.generations.items() if error or other != label]
        begun = any(map(_has_begun, others)) or getattr(self.generations[label], "may_have_run", False)
        busy, seconds = isinstance(error, Busy), now - self.reserved
        require(not busy or not begun, f"{label} was sent away as busy, and its group has begun")
        require(not busy or seconds >= MAX_WAIT_S, f"{label} was sent away as busy after {seconds:.1f} s")
        bound = max(self.submitted_at, self.reserved + MAX_WAIT_S) + WAIT_SLACK_S
        late = now > bound and not (begun or self.frozen)
        require(not late, f"{label} waited {seconds:.1f} s, and may wait {MAX_WAIT_S} s")

    def hear(self, label: str, delta: Any) -> None:
        require(label not in self.ends, f"{label} is heard of after its end")
        self.tokens[label] += delta.tokens
        whole, finish = expected(self.generations[label].request)
        got = tuple(self.tokens[label])
        require(got == whole[: len(got)], f"{label} got {got}, not {whole}")
        if delta.finish is not None:
            self.ends[label] = "done"
            stopped = delta.finish.reason is FinishReason.STOP and label in self.taken_back
            require(stopped or delta.finish == finish, f"{label} ends with {delta.finish}, not {finish}")
            require(stopped or got == whole, f"{label} ends with {got}, not {whole}")

    def state(self) -> tuple[Any, ...]:
        return (
            self.ask.name,
            self.reservation,
            self.refused,
            self.submitted,
            self.left,
            self.frozen,
            (self.reserved, self.submitted_at) if len(self.ends) < self.ask.rows else (),
            self.generations,
            self.tokens,
            self.ends,
            self.taken_back,
        )


def _has_begun(generation: Generation) -> bool:
    """Whether its wait is over: it runs, or may have run when an engine died."""
    return generation.started is not None or getattr(generation, "may_have_run", False)


class Ends:
    """An observer that counts the ends of each request's rows, as its kind is its name."""

    def __init__(self) -> None:
        self.finished_: Counter[str] = Counter()

    def finished(self, kind: str, reason: str, total_s: float) -> None:
        self.finished_[kind] += 1

    def ignore(self, *_: Any) -> None: ...

    admitted = first_token = tokens = refused = step = restarted = died = replayed = quarantined = ignore
