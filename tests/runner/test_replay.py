"""The calls of the runner's protocol as a log: another runner that replays it computes the same."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.test_lookahead import ahead, in_lock_step, named, requests
from tests.support.capabilities import capabilities
from treadle.core import block_budget
from treadle.core.capabilities import Capabilities
from treadle.core.plan import StepPlan, StepResult
from treadle.runner.model_runner import ModelRunner

PLANS = msgspec.msgpack.Decoder(StepPlan)


class Recorded(ModelRunner):
    """Writes a log of all calls that change it, as bytes, and what its steps gave. `match_prefix` and `free_blocks`
    are not in it: they change nothing. Gives out 19 blocks of 8 tokens, so that some sequences are preempted."""

    log: list[tuple[str, bytes]]
    results: list[StepResult]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log, self.results = [], []

    def capabilities(self) -> Capabilities:
        return capabilities(super().capabilities(), kv_block=8, kv_blocks=19)

    def free_blocks(self) -> int:
        return 19 - sum(-(-row.cached // 8) for row in self._rows.values())

    def start(self, plan: StepPlan) -> None:
        self.log.append(("start", msgspec.msgpack.encode(plan)))
        super().start(plan)

    def finish(self) -> StepResult:
        self.log.append(("finish", b""))
        self.results.append(super().finish())
        return self.results[-1]

    def release(self, row_id: str) -> None:
        self.log.append(("release", row_id.encode()))
        super().release(row_id)

    def trim_memory(self) -> None:
        self.log.append(("trim_memory", b""))
        super().trim_memory()


def replay(log: list[tuple[str, bytes]], runner: ModelRunner) -> list[StepResult]:
    results = []
    for call, argument in log:
        match call:
            case "start":
                runner.start(PLANS.decode(argument))
            case "finish":
                results.append(runner.finish())
            case "release":
                runner.release(argument.decode())
            case _:
                runner.trim_memory()
    return results


def content(result: StepResult) -> tuple[Any, ...]:
    return result.rows, result.scores, result.failures, result.evicted


@pytest.mark.parametrize(
    ("name", "lookahead", "seed"),
    [
        ("llama", 0, 0),
        ("llama", 1, 1),
        ("padded llama", 1, 3),
        ("padded qwen3_next", 1, 4),
    ],
)
def test_a_log_of_calls_gives_the_same_results_on_another_runner(
    tiny: Tiny, name: str, lookahead: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts that are reused, preemption and cancels."""
    monkeypatch.setattr(block_budget, "EXPECTED_TOKENS", 1)
    model = named(tiny, name)
    model = ahead(model) if lookahead else in_lock_step(model)
    dice, runner = random.Random(seed), Recorded(model)
    loop = Looped(runner, prefill_tokens=32)
    for one in requests(dice):
        loop.submit(msgspec.structs.replace(one, max_tokens=40, stop_token_ids=(), min_tokens=0))
        for _ in range(dice.choice((0, 0, 1))):
            loop.step()
        if dice.random() < 0.2:
            loop.cancel(one.id)
    loop.run()
    found = loop.scheduler.statistics(0.0, runner.statistics())
    assert found.preempted
    assert found.cached_tokens
    again = replay(runner.log, ModelRunner(model))
    assert [content(result) for result in again] == [content(result) for result in runner.results]
