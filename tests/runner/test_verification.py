"""Verified draft tokens: whatever is proposed, each request gains what it gains without."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from tests.runner.backends import configured
from tests.runner.conftest import Tiny
from tests.runner.speculated import Speculated
from tests.runner.test_constrained_rows import PERSON, WORD
from tests.runner.test_lookahead import KINDS, ahead, requests
from tests.support import cuda
from tests.support.grammars import Grammars, byte_tokenizer, lark
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny import EOS, IM_END
from treadle.core.messages import Sampling, Submit, Thinking, TokenLogprob
from treadle.core.plan import Admit, DecodeRow, DraftTrial, PrefillChunk, StepPlan
from treadle.runner.base import RunnerBroken
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.sampling import sampler
from treadle.runner.sampling.sampling_kernel import SamplingKernel

ACCEPTANCES = (0.0, 0.3, 0.6, 0.9, 1.0)
THINKING = Thinking(open_ids=(200,), close_ids=(201, 202), opened=True, budget=4)
CALL = lark('start: "a" /[0-9]{1,4}/ "-and-then-" /[a-c]{2}/')


def mixed(seed: int) -> list[Submit]:
    """Requests of every kind of sampling, some of whom do not speculate, and constrained ones."""
    dice = random.Random(seed)
    free = requests(dice, count=2 * len(KINDS))
    free = [msgspec.structs.replace(one, speculate=i % 4 != 3) for i, one in enumerate(free)]
    held = [
        Submit(
            id=f"c{i}",
            prompt=tuple(dice.randrange(256) for _ in range(dice.choice([1, 9, 50]))),
            max_tokens=60,
            sampling=msgspec.structs.replace(KINDS[("greedy", "drawn", "penalised")[i % 3]], seed=i),
            stop_token_ids=(EOS, IM_END),
            logprobs=(None, 2)[i % 2],
            **limits,
        )
        for i, limits in enumerate(LIMITS)
    ]
    return [*free, *held]


LIMITS: list[dict[str, Any]] = [
    {"constraint": PERSON},
    {"constraint": WORD, "thinking": THINKING},
    {"thinking": THINKING},
    {"constraint": CALL},
    {"constraint": msgspec.structs.replace(CALL, triggers=("a",), then_free=True)},
    {"constraint": msgspec.structs.replace(PERSON, close_at_limit=True), "thinking": THINKING},
]


def made(model: LoadedModel, drafter: ScriptedDrafter | None = None) -> ModelRunner:
    grammars = Grammars(byte_tokenizer(model.vocabulary)) if has_grammars(model) else None
    return ModelRunner(model, grammars=grammars, drafter=drafter)


def has_grammars(model: LoadedModel) -> bool:
    """Whether its vocabulary has room for the special tokens of grammars."""
    return model.vocabulary > IM_END


def same(found: Speculated, wanted: Speculated) -> None:
    assert found.failures == wanted.failures == {}
    for id_, row in wanted.rows.items():
        assert found.rows[id_].tokens == row.tokens, id_
        assert [numbers(one) for one in found.rows[id_].logprobs] == [
            pytest.approx(numbers(one), abs=1e-3) for one in row.logprobs
        ]


def numbers(one: TokenLogprob) -> list[float]:
    return [one.logprob, *(value for _, value in one.top)]


Plain = Callable[[str], tuple[list[Submit], Speculated]]


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Plain:
    """Requests, and what they gain without drafts."""

    @cache
    def get(name: str) -> tuple[list[Submit], Speculated]:
        some = [one for one in mixed(0) if one.constraint is None or has_grammars(tiny(name))]
        run = Speculated(made(tiny(name)), some, drafts=0)
        run.run()
        return some, run

    return get


def answers(run: Speculated) -> dict[str, list[int]]:
    return {id_: row.tokens for id_, row in run.rows.items()}


MODELS = ("llama", "gemma3", "qwen3_next", "falcon_h1")
"""Full attention, windows, and recurrent states that are computed again."""


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("name", MODELS)
def test_every_request_gains_what_it_gains_without_drafts(
    tiny: Tiny, plain: Plain, name: str, acceptance: float
) -> None:
    """All together, with some that are preempted, and some that leave."""
    some, wanted = plain(name)
    drafter = ScriptedDrafter(answers(wanted), acceptance)
    runner = made(tiny(name), drafter)
    found = Speculated(runner, some, drafts=3)
    found.run()
    same(found, wanted)
    assert found.verifying > found.steps // 4
    assert found.accepted <= drafter.proposed
    assert (found.accepted > 0) == (acceptance > 0)
    again = Speculated(runner, some, drafts=8, chunk=16)
    left = ("r1", "r2")
    tokens = again.run(preempt=1, cancel=left)
    assert tokens == {id_: all_[: len(tokens[id_])] for id_, all_ in answers(wanted).items()}
    assert all(len(tokens[id_]) == len(row.tokens) for id_, row in wanted.rows.items() if id_ not in left)
    assert drafter.released >= again.rows.keys()
    assert runner.statistics().kv_bytes == 0
