"""Runs requests through a runner under schedules that a test chooses, and checks the plans' rules on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from treadle.core.messages import Submit, TokenLogprob
from treadle.core.plan import Admit, DecodeRow, PrefillChunk, StepPlan, StepResult
from treadle.runner.model_runner import ModelRunner


@dataclass(eq=False)
class Going:
    """One request as the engine would see it."""

    request: Submit
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    joined: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.request.max_tokens

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.tokens)

    @property
    def prefill_left(self) -> int:
        return len(self.all_tokens) - 1 - self.cached

    def rewind(self) -> None:
        self.cached, self.joined = 0, False


@dataclass
class Choice:
    """What the next step does: which sequences take part, with chunks of at most `chunk` tokens."""

    active: Sequence[Going]
    chunk: int


class Drive:
    """Builds plans for some sequences and applies the results."""

    def __init__(self, runner: ModelRunner, requests: Sequence[Submit]) -> None:
        self.runner = runner
        self.live = {request.id: Going(request) for request in requests}
        self.all = dict(self.live)
        self.failures: dict[str, str] = {}
        self.steps = 0

    def step(self, choice: Choice) -> StepResult:
        plan = self.plan(choice)
        result = self.runner.execute(plan)
        self.apply(plan, result)
        return result

    def plan(self, choice: Choice) -> StepPlan:
        self.steps += 1
        admit, prefill, decode = [], [], []
        for row in choice.active:
            if not row.joined:
                admit.append(Admit(request=row.request, history=tuple(row.tokens)))
                row.joined = True
            if row.prefill_left:
                tokens = row.all_tokens[row.cached : row.cached + min(choice.chunk, row.prefill_left)]
                prefill.append(PrefillChunk(id=row.id, start=row.cached, count=len(tokens)))
                row.cached += len(tokens)
            if not row.prefill_left:
                decode.append(DecodeRow(id=row.id, position=len(row.tokens)))
        return StepPlan(step=self.steps, admit=tuple(admit), prefill=tuple(prefill), decode=tuple(decode))

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        assert {r.id for r in result.rows} | {f.id for f in result.failures} >= {d.id for d in plan.decode}
        for failure in result.failures:
            self.failures[failure.id] = failure.message
            self.live.pop(failure.id, None)
        for gained in result.rows:
            row = self.live[gained.id]
            row.tokens.extend(gained.tokens)
            row.logprobs.extend(gained.logprobs)
            row.cached += len(gained.tokens)
            if row.done:
                self.runner.release(row.id)
                del self.live[row.id]

    def run(self, choose: Callable[[Drive], Choice] | None = None) -> dict[str, list[int]]:
        """Steps until everything ended; the tokens of each request."""
        while self.live:
            self.step(choose(self) if choose else Choice(list(self.live.values()), 10_000))
        return {id_: row.tokens for id_, row in self.all.items()}


def run_alone(runner: ModelRunner, request: Submit) -> list[int]:
    return Drive(runner, [request]).run()[request.id]


def seeded_choices(seed: int, *, most_running: int = 4) -> Callable[[Drive], Choice]:
    """Random arrivals, chunk sizes from 1 to everything, and rows held back now and then."""
    dice = random.Random(seed)

    def choose(drive: Drive) -> Choice:
        joined = [row for row in drive.live.values() if row.joined]
        fresh = [row for row in drive.live.values() if not row.joined]
        room = most_running - len(joined)
        new = fresh[: dice.randint(0 if joined else 1, max(1, room))] if room > 0 else []
        kept = [row for row in joined if dice.random() > 0.15]
        return Choice(kept + new or joined[:1], dice.choice([1, 2, 3, 7, 16, 10_000]))

    return choose
