"""Requests of every kind for speculation, and runners over scripted drafts."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.runner.speculated import Speculated
from tests.runner.test_constrained_rows import PERSON, WORD
from tests.runner.test_lookahead import KINDS, requests
from tests.support.grammars import Grammars, byte_tokenizer, lark
from tests.support.tiny import EOS, IM_END
from treadle.core.messages import Submit, Thinking, TokenLogprob
from treadle.runner.drafting.drafter import Drafter
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner
from treadle.runner.scoring.scorer import Scorer

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


def made(model: LoadedModel, drafter: Drafter | None = None, scorer: Scorer | None = None) -> ModelRunner:
    grammars = Grammars(byte_tokenizer(model.vocabulary)) if has_grammars(model) else None
    return ModelRunner(model, grammars=grammars, drafter=drafter, scorer=scorer)


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


def answers(run: Speculated) -> dict[str, list[int]]:
    return {id_: row.tokens for id_, row in run.rows.items()}
