"""A runner that computes nothing: it says what its script says, and keeps count of what it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treadle.core.messages import Capabilities, RunnerStatistics, Submit, TokenLogprob
from treadle.core.plan import RowTokens, StepPlan, StepResult
from treadle.runner.base import Job

Script = Callable[[Submit, int], int]
"""The token that a request gets at a position."""


class ScriptedRunner:
    """`script` picks the tokens. `fail` is raised by the next step when it is set."""

    def __init__(self, script: Script, *, vocabulary: int, context: int = 4096) -> None:
        self.script = script
        self.rows: dict[str, Submit] = {}
        self.seen: list[Submit] = []
        self.plans: list[StepPlan] = []
        self.fail: Exception | None = None
        self._can = Capabilities(
            model="scripted",
            architecture="none",
            vocabulary=vocabulary,
            context=context,
            device="cpu",
            dtype="float32",
        )

    def capabilities(self) -> Capabilities:
        return self._can

    def warm_up(self) -> None:
        return

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.fail is not None:
            raise self.fail
        for admit in plan.admit:
            self.rows[admit.request.id] = admit.request
            self.seen.append(admit.request)
        return StepResult(rows=tuple(self._row(row.id, row.position) for row in plan.decode))

    def _row(self, row_id: str, position: int) -> RowTokens:
        request = self.rows[row_id]
        token = self.script(request, position)
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(request.logprobs))
            logprobs = (TokenLogprob(logprob=-0.5, top=top),)
        return RowTokens(id=row_id, tokens=(token,), logprobs=logprobs)

    def release(self, row_id: str) -> None:
        self.rows.pop(row_id, None)

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics()

    def jobs(self) -> Mapping[str, Job]:
        return {}

    def close(self) -> None:
        self.rows.clear()
