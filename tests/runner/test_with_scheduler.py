"""Scheduler and runner together, in the engine's loop: arrivals, cancels, faults, prefixes and preemption at random.

Whatever happens, each sequence is what mlx-lm's own single-sequence generation gives, or what it is alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.runner.conftest import Tiny
from tests.runner.drive import run_alone
from tests.runner.looped import Looped
from tests.runner.parting import PARTING
from tests.runner.reference import reference, references
from tests.support.capabilities import capabilities
from treadle.core.capabilities import Capabilities
from treadle.core.messages import FinishReason, Sampling, Submit
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner

POISON = 250
OWN = ["llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss", "smollm3"]


class Poisonous:
    """Raises whenever the token POISON is fed in a pass that decodes, and now and then for no reason."""

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


def _prompts(dice: random.Random, count: int) -> list[tuple[int, ...]]:
    """Some begin as another one does: all of it, some of it, up to a block's border, or with tokens of a block more."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        fresh = tuple(dice.randrange(240) for _ in range(dice.choice([1, 20, 70, 130])))
        if prompts and dice.random() < 0.7:
            trunk = dice.choice(prompts)
            cut = dice.choice([len(trunk), dice.randint(0, len(trunk)), 32, 64, 33])
            fresh = (trunk[:cut] + fresh[: dice.choice([0, 1, 40])]) or fresh
        prompts.append(fresh[:130])
    return prompts


def _requests(dice: random.Random, count: int, *, greedy: bool = False) -> list[Submit]:
    return [
        Submit(
            id=f"r{i}",
            prompt=prompt,
            max_tokens=dice.randint(1, 30) if not greedy else dice.randint(10, 50),
            sampling=Sampling() if greedy or dice.random() < 0.5 else _warm(i),
            logprobs=dice.choice([None, 2]),
            max_wait_s=1e9,
        )
        for i, prompt in enumerate(_prompts(dice, count))
    ]


def _warm(seed: int) -> Sampling:
    return Sampling(temperature=1.0, top_p=0.9, top_k=40, frequency_penalty=0.1, seed=seed)


def _at_random(loop: Looped, requests: Sequence[Submit], dice: random.Random) -> set[str]:
    """Let `requests` arrive, and some of them leave; which."""
    waiting, cancelled = list(requests), set()
    while waiting or loop.has_work:
        while waiting and dice.random() < 0.5:
            loop.submit(waiting.pop(0))
        if dice.random() < 0.04:
            victim = dice.choice(requests).id
            loop.cancel(victim)
            cancelled.add(victim)
        loop.step()
    return cancelled


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_whatever_happens_each_sequence_is_what_it_is_alone(either: Tiny, architecture: str, seed: int) -> None:
    """B4, B5, B7: cancels and raising steps change nobody else's tokens, and nothing is left behind."""
    dice = random.Random(seed)
    model = either(architecture)
    runner = ModelRunner(replace(model, module=Poisonous(model.module, random.Random(seed))))
    loop = Looped(runner)
    requests = _requests(dice, 14)
    requests.insert(5, Submit(id="guilty", prompt=(1, 2, POISON), max_tokens=5, max_wait_s=1e9))
    cancelled = _at_random(loop, requests, dice)
    alone = ModelRunner(model)
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


class SmallBlocks(ModelRunner):
    """Gives out `blocks` blocks of 8 tokens, so that rows outgrow them soon."""

    blocks = 23

    def capabilities(self) -> Capabilities:
        return capabilities(super().capabilities(), kv_block=8, kv_blocks=self.blocks)

    def free_blocks(self) -> int:
        return self.blocks - sum(-(-row.cached // 8) for row in self._rows.values())


@pytest.mark.parametrize(
    ("seed", "architecture"), [(1 + i % 3, name) for i, name in enumerate((*OWN, "gemma3", "llama"))]
)
def test_greedy_is_mlx_lms_own_whatever_is_cached_or_preempted(tiny: Tiny, architecture: str, seed: int) -> None:
    """Joins, leaves, prefix hits and preemption."""
    dice = random.Random(seed)
    runner = SmallBlocks(tiny(architecture))
    loop = Looped(runner, max_running=8, prefill_tokens=64)
    requests = _requests(dice, 20, greedy=True)
    cancelled = _at_random(loop, requests, dice)
    for request in requests:
        got = loop.tokens(request.id)
        wanted = reference(tiny(architecture), request, got)
        assert got == wanted[: len(got)]
        assert len(got) == len(wanted) or request.id in cancelled
    statistics = runner.statistics()
    assert statistics.kv_bytes == 0
    assert statistics.prefix.reused > 0
    assert loop.scheduler.statistics(0.0, statistics).preempted > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rows_that_outgrow_the_memory_end_as_if_they_had_not(tiny: Tiny, architecture: str) -> None:
    """Three rows come to three blocks each, and there are six."""
    model = tiny(architecture)
    runner = ModelRunner(tiny(architecture, memory=_memory(model, 6, rows=3), max_running=3))
    assert runner.capabilities().kv.blocks == 6
    loop = Looped(runner, max_running=3, prefill_tokens=512)
    requests = [Submit(id=f"r{i}", prompt=(i + 1, 7 * i) * 125, max_tokens=270, max_wait_s=1e9) for i in range(3)]
    together = loop.run(*requests)
    assert together == references(model, requests, together)
    assert loop.scheduler.statistics(0.0, runner.statistics()).preempted > 0


def _memory(model: LoadedModel, blocks: int, rows: int) -> int:
    """A budget of that many blocks."""
    return rows * model.kv.row_bytes + blocks * 256 * model.kv.token_bytes


@pytest.mark.parametrize("architecture", OWN)
def test_prompts_are_reused_wherever_they_part(tiny: Tiny, architecture: str) -> None:
    """F6: the same again, one that goes on, and those that part inside a block, at a border, and after the window."""
    model = tiny(architecture)
    runner = ModelRunner(model)
    loop = Looped(runner, prefill_tokens=512)
    for name, (prompt, reused) in PARTING.items():
        request = Submit(id=name, prompt=prompt, max_tokens=12)
        answer = loop.run(request)[name]
        assert answer == reference(model, request, answer), name
        assert loop.cached(name) == reused, name


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_conversation_is_reused_turn_by_turn(tiny: Tiny, architecture: str) -> None:
    """Each turn finds its last one's prompt and answer, but for the last token, which nothing was computed from."""
    model = tiny(architecture)
    loop = Looped(ModelRunner(model), prefill_tokens=512)
    dice = random.Random(1)
    prompt, known = tuple(dice.randrange(256) for _ in range(50)), 0
    for turn in range(4):
        request = Submit(id=f"turn {turn}", prompt=prompt, max_tokens=37)
        answer = loop.run(request)[request.id]
        assert answer == reference(model, request, answer)
        assert loop.cached(request.id) == known
        known = len(prompt) + len(answer) - 1
        prompt = (*prompt, *answer, *(dice.randrange(256) for _ in range(9)))


def test_those_of_another_salt_find_nothing(tiny: Tiny) -> None:
    """One tenant cannot learn what another one asked: not by what is reused, nor by what it is told."""
    loop = Looped(ModelRunner(tiny()), prefill_tokens=512)
    prompt = tuple(range(97))
    for id_, salt, cached in [("a", "x", 0), ("b", "y", 0), ("c", "", 0), ("d", "x", 96), ("e", "y", 96)]:
        loop.run(Submit(id=id_, prompt=prompt, max_tokens=3, salt=salt))
        assert loop.cached(id_) == cached, id_


def test_without_a_prefix_cache_nothing_is_kept(tiny: Tiny) -> None:
    runner = ModelRunner(tiny(prefix_cache=False))
    assert not runner.capabilities().steps.prefix_cache
    loop = Looped(runner)
    for id_ in "ab":
        loop.run(Submit(id=id_, prompt=tuple(range(100)), max_tokens=40))
        assert loop.cached(id_) == 0
    assert runner.statistics().prefix.held == 0


def test_what_is_kept_stays_within_the_budget_beside_the_rows(tiny: Tiny) -> None:
    model = tiny()
    runner = ModelRunner(tiny(memory=_memory(model, 4, rows=2), max_running=2))
    budget = runner.capabilities().kv.budget_bytes
    loop = Looped(runner, max_running=2, prefill_tokens=512)
    for i in range(8):
        loop.run(Submit(id=f"r{i}", prompt=(i,) * 300, max_tokens=50))
        statistics = runner.statistics()
        assert statistics.kv_bytes + statistics.prefix.held_bytes <= budget
    assert runner.statistics().prefix.evicted > 0
    assert runner.statistics().prefix.held > 0
