"""Owners for the check's tests, each with one fault: entries for the engine's child (`module:function`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tests.support.scripted import ScriptedRunner
from treadle.compose.owner import OwnerSpec
from treadle.core.capabilities import Capabilities
from treadle.core.messages import Submit, TokenLogprob
from treadle.core.plan import RowTokens, StepPlan, StepResult
from treadle.engine.owner import OwnerLimits
from treadle.runner.base import Progress, Runner, RunnerFactory

VOCABULARY = 261


def _plain(request: Submit, position: int) -> int:
    return (sum(request.prompt) + position) % VOCABULARY


class Unfaithful(ScriptedRunner):
    """Answers otherwise to all but the first of the requests that came together; `gap` is how far apart, in nats, it
    says that the two answers are."""

    def __init__(self, gap: float) -> None:
        super().__init__(_plain, vocabulary=VOCABULARY, context=2048)
        self.gap = gap

    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities(), dtype="bfloat16")

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return StepResult(rows=tuple(self._bent(row) for row in result.rows))

    def _bent(self, row: RowTokens) -> RowTokens:
        request, (token,) = self.rows[row.id], row.tokens
        other = (token + 1) % VOCABULARY
        batched = not row.id.endswith(".0") and token != _plain(request, 0)
        top = ((token, -0.5), (other, -0.5 - self.gap))
        logprobs = () if request.logprobs is None else (TokenLogprob(logprob=-0.5, top=top),)
        return RowTokens(id=row.id, tokens=(other if batched else token,), logprobs=logprobs)


class Stuck(ScriptedRunner):
    """Its first step never ends."""

    def __init__(self) -> None:
        super().__init__(_plain, vocabulary=VOCABULARY, context=2048)

    def execute(self, plan: StepPlan) -> StepResult:
        threading.Event().wait()
        raise AssertionError


def _owner(arguments: Mapping[str, Any], make: Callable[[], Runner]) -> tuple[RunnerFactory, OwnerLimits]:
    def build(progress: Progress) -> Runner:
        return make()

    return build, msgspec.convert(arguments, OwnerSpec).limits


def unfaithful(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    return _owner(arguments, lambda: Unfaithful(gap=2.0))


def tied(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    return _owner(arguments, lambda: Unfaithful(gap=0.125))


def stuck(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    return _owner(arguments, Stuck)


def once(arguments: Mapping[str, Any]) -> tuple[RunnerFactory, OwnerLimits]:
    """Starts once, and never again: the flag is a file beside the model."""
    from pathlib import Path

    flag = Path(arguments["folder"]) / "started"

    def make() -> Runner:
        flag.touch(exist_ok=False)
        return ScriptedRunner(_plain, vocabulary=VOCABULARY, context=2048)

    return _owner(arguments, make)
