"""Scheduler and runner together, as the engine's loop drives them: arrivals, cancels and faults at random."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.runner.conftest import Tiny
from tests.runner.drive import run_alone
from treadle.core.messages import Cancel, FinishReason, Output, Sampling, Submit
from treadle.core.scheduler import Scheduler, SchedulerLimits
from treadle.runner.text import TextRunner

POISON = 250


class Poisonous:
    """Raises whenever the token POISON is fed, and now and then for no reason."""

    def __init__(self, module: Any, dice: random.Random) -> None:
        self._module = module
        self._dice = dice

    def __call__(self, tokens: Any, **kwargs: Any) -> Any:
        out = self._module(tokens, **kwargs)
        if tokens.shape[1] == 1 and (POISON in tokens.flatten().tolist() or self._dice.random() < 0.02):
            raise ArithmeticError("poison")
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Loop:
    """The engine's loop without the engine."""

    def __init__(self, runner: TextRunner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(SchedulerLimits(max_running=5, prefill_tokens=32))
        self.now = 0.0
        self.outputs: dict[str, list[Output]] = {}

    def step(self) -> None:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        for id_ in plan.release:
            self.runner.release(id_)
        try:
            result = self.runner.execute(plan)
        except ArithmeticError as error:
            told = self.scheduler.recover(plan, str(error))
        else:
            told = self.scheduler.apply(plan, result)
        for output in told:
            self.outputs.setdefault(output.id, []).append(output)
        self.scheduler.check_integrity()

    def tokens(self, id_: str) -> list[int]:
        return [token for output in self.outputs[id_] for token in output.tokens]

    def finish(self, id_: str) -> FinishReason:
        ends = [output.finish for output in self.outputs[id_] if output.finish is not None]
        assert len(ends) == 1, id_
        return ends[0].reason


def _submit(dice: random.Random, i: int) -> Submit:
    prompt = tuple(dice.randrange(240) for _ in range(dice.choice([1, 3, 20, 70])))
    warm = Sampling(temperature=1.0, top_p=0.9, top_k=40, frequency_penalty=0.1, seed=i)
    return Submit(
        id=f"r{i}",
        prompt=prompt,
        max_tokens=dice.randint(1, 30),
        sampling=dice.choice([Sampling(), warm]),
        logprobs=dice.choice([None, 2]),
        max_wait_s=1e9,
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_whatever_happens_each_sequence_is_what_it_is_alone(tiny: Tiny, architecture: str, seed: int) -> None:
    """B4, B5, B7: cancels and raising steps change nobody else's tokens, and nothing is left behind."""
    dice = random.Random(seed)
    model = tiny(architecture)
    runner = TextRunner(replace(model, module=Poisonous(model.module, random.Random(seed))))
    loop = Loop(runner)
    requests = [_submit(dice, i) for i in range(14)]
    guilty = Submit(id="guilty", prompt=(1, 2, POISON), max_tokens=5, max_wait_s=1e9)
    requests.insert(5, guilty)
    cancelled = set()
    waiting = list(requests)
    while waiting or loop.scheduler.has_work:
        while waiting and dice.random() < 0.4:
            loop.scheduler.submit(waiting.pop(0), loop.now)
        if dice.random() < 0.04:
            victim = dice.choice(requests).id
            loop.scheduler.cancel(Cancel(id=victim), loop.now)
            cancelled.add(victim)
        loop.step()
    alone = TextRunner(model)
    for request in requests:
        got, end = loop.tokens(request.id), loop.finish(request.id)
        if end is FinishReason.LENGTH:
            assert got == run_alone(alone, request)
        elif end is FinishReason.CANCELLED:
            assert request.id in cancelled
            assert got == run_alone(alone, request)[: len(got)]
    assert loop.finish("guilty") in (FinishReason.ERROR, FinishReason.CANCELLED)
    assert runner.statistics().kv_bytes == 0
    assert not runner._rows
    assert not runner._own
