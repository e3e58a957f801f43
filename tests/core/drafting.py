"""Engine of a scheduler whose steps take simulated time, and whose drafts are accepted by a given chance."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from treadle.core.capabilities import StepCost
from treadle.core.draft_budget import DraftBudget
from treadle.core.messages import Output, Submit
from treadle.core.plan import DraftTrial, RowTokens, StepPlan, StepResult
from treadle.core.scheduler import Scheduler, SchedulerLimits
from treadle.core.verify_costs import VerifyCosts

MOST = 8
ROWS = (1, 2, 4, 8, 16, 32, 64)
Device = Callable[[int, int], float]


@dataclass(frozen=True)
class Machine:
    """Seconds of the host to start a step, and of the device for `rows` sequences and tokens in all. Steps overlap:
    the host starts the next one while the device computes. It spends `look_s` for each sequence for which it looks for
    drafts."""

    host_s: float
    device: Device
    look_s: float = 0.0

    def plain_s(self, rows: int) -> float:
        return max(self.host_s, self.device(rows, rows))

    def verifying_s(self, rows: int, tokens: int) -> float:
        return self.host_s + self.device(rows, tokens)

    def budget(self, wrong: float = 1.0) -> DraftBudget:
        """A budget by this machine's costs; those of verifying steps are `wrong` times too high."""
        plain = [StepCost(rows, rows, self.plain_s(rows)) for rows in ROWS]
        verifying = [
            StepCost(rows, rows * (1 + n), wrong * self.verifying_s(rows, rows * (1 + n)))
            for rows in ROWS
            for n in (0, 1, 3, 7)
        ]
        return DraftBudget(VerifyCosts(plain, verifying), MOST)


@dataclass
class Engine:
    """Runs `rows` sequences that never end. `accepts` is a row's chance that a draft is right, of `ready` ones that it
    has in each step, behind `match` matching tokens; `told` of them are tried for free by plain steps. A row that
    `forgets` has none behind a plain step whose token is not the first of them; one that `refuses` verifies none, as
    if its grammar allowed none. The first steps that verify take `slow_s` longer."""

    machine: Machine
    rows: int
    accepts: Callable[[str], float]
    given: DraftBudget | None
    ready: int = MOST
    most: int = MOST
    told: int = 0
    match: int = 0
    lookahead: int = 1
    forgets: bool = False
    refuses: bool = False
    slow_s: list[float] = field(default_factory=list)
    now: float = 0.0
    tokens: int = 0
    ends: deque[tuple[StepPlan, float]] = field(default_factory=deque)
    _device_free: float = 0.0

    def __post_init__(self) -> None:
        limits = SchedulerLimits(self.rows + 1, 512, lookahead=self.lookahead, draft_tokens=self.most)
        self.scheduler = Scheduler(limits, drafts=self.given)
        self.chance = random.Random(self.rows)
        self.plans: list[StepPlan] = []
        for i in range(self.rows):
            self.scheduler.submit(Submit(id=str(i), prompt=(1, 2, 3), max_tokens=10**9), 0.0)

    @property
    def budget(self) -> DraftBudget:
        assert self.given is not None
        return self.given

    def run(self, steps: int) -> float:
        """Run some steps. Return the tokens per second."""
        began, tokens = self.now, self.tokens
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.now - began)

    def gain(self, tokens: int) -> float:
        """Run until the sequences have so many tokens each, on average. Return the tokens per second."""
        began, before = self.now, self.tokens
        while self.tokens - before < tokens * self.rows:
            self.step()
        return (self.tokens - before) / (self.now - began)

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        if plan.idle:
            self._finish()
            return
        self.plans.append(plan)
        self.now += self.machine.host_s
        drafts = 0 if self.refuses else sum(decode.drafts for decode in plan.decode)
        tokens = len(plan.decode) + drafts + sum(chunk.count for chunk in plan.prefill)
        self._device_free = max(self.now, self._device_free) + self.machine.device(len(plan.decode), tokens)
        if plan.verifies and self.slow_s:
            self._device_free += self.slow_s.pop()
        self.ends.append((plan, self._device_free))
        if len(self.ends) > self.lookahead:
            self._finish()

    def _finish(self) -> tuple[Output, ...]:
        plan, end = self.ends.popleft()
        self.now = max(self.now, end)
        looking_s = self.machine.look_s * len(plan.decode) if plan.propose else 0.0
        self.now += looking_s
        result = StepResult(
            proposing_s=looking_s / 3, rows=tuple(self._gain(plan, row.id, row.drafts) for row in plan.decode)
        )
        if plan.propose and self.told:
            result = replace(result, trials=tuple(self._trial(row.id) for row in plan.decode))
        return self.scheduler.apply(plan, result)

    def _gain(self, plan: StepPlan, id_: str, drafts: int) -> RowTokens:
        drafts = 0 if self.refuses else drafts
        accepted = self._accepted(id_, drafts)
        self.tokens += 1 + accepted
        ready = self.ready if plan.propose else 0
        if self.forgets and not drafts and not self._accepted(id_, 1):
            ready = 0
        return RowTokens(id_, (7,) * (1 + accepted), drafted=drafts, ready=ready, match=self.match)

    def _trial(self, id_: str) -> DraftTrial:
        return DraftTrial(id_, self.told, self._accepted(id_, self.told), self.match)

    def _accepted(self, id_: str, drafts: int) -> int:
        return next((n for n in range(drafts) if self.chance.random() >= self.accepts(id_)), drafts)
