"""Constrained rows beside free ones, through whole runners: their answers are valid, and nobody else's change."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.paged.models import loaded, make, paged
from tests.runner.test_lookahead import KINDS, ahead, assert_alike
from tests.support.grammars import Grammars, byte_tokenizer, lark, regex, schema
from tests.support.tiny import EOS, IM_END
from treadle.core.messages import Constraint, FinishReason, Submit
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner

PERSON = schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
WORD = regex("[a-z]{3,8}")
CALL = lark('start: "<call>" /[0-9]{1,4}/ "</call>"')


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age", "tags"} and 0 <= value["age"] <= 150 and len(value["tags"]) <= 3


VALID: dict[str, tuple[Constraint, Callable[[str], Any]]] = {
    "person": (PERSON, is_person),
    "word": (WORD, re.compile("[a-z]{3,8}").fullmatch),
    "call": (CALL, re.compile("<call>[0-9]{1,4}</call>").fullmatch),
}


def constrained(kind: str, i: int, dice: random.Random, sampling: str) -> Submit:
    return Submit(
        id=f"{kind} {i}",
        prompt=tuple(dice.randrange(256) for _ in range(dice.choice([1, 5, 60]))),
        max_tokens=120,
        sampling=msgspec.structs.replace(KINDS[sampling], seed=i),
        stop_token_ids=(EOS, IM_END),
        min_tokens=dice.choice([0, 0, 100]),
        logprobs=dice.choice([None, 2]),
        constraint=VALID[kind][0],
        max_wait_s=1e9,
    )


def free(i: int, dice: random.Random) -> Submit:
    return Submit(
        id=f"free {i}",
        prompt=tuple(dice.randrange(256) for _ in range(dice.choice([1, 20, 70]))),
        max_tokens=dice.randint(5, 40),
        sampling=msgspec.structs.replace(KINDS[dice.choice(list(KINDS))], seed=i),
        logprobs=dice.choice([None, 1]),
        max_wait_s=1e9,
    )


def mixed(seed: int, count: int = 8) -> tuple[list[Submit], list[Submit]]:
    dice, kinds = random.Random(seed), list(KINDS)
    some = [constrained(list(VALID)[i % 3], i, dice, kinds[i % len(kinds)]) for i in range(count)]
    return some, [free(i, dice) for i in range(count)]


def runner_of(model: LoadedModel) -> ModelRunner:
    return ModelRunner(model, grammars=Grammars(byte_tokenizer(model.vocabulary)))


def check_valid(loop: Looped, some: Sequence[Submit]) -> None:
    for request in some:
        tokens = loop.tokens(request.id)
        assert loop.finish(request.id) is FinishReason.STOP, request.id
        assert tokens[-1] in request.stop_token_ids
        assert VALID[request.id.split()[0]][1](text_of(tokens[:-1])), text_of(tokens)


BACKENDS = ("contiguous", "ahead", "padded", "paged")


def model_of(backend: str, tiny: Tiny) -> LoadedModel:
    if backend == "paged":
        return loaded(made := make("llama"), paged(made))
    model = tiny("llama", padded=backend == "padded")
    return ahead(model) if backend == "ahead" else model


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_valid_and_free_rows_are_what_they_are_without_them(tiny: Tiny, backend: str, seed: int) -> None:
    """Greedy, drawn, with penalties, biases and log-probabilities, in every batch."""
    some, others = mixed(seed)
    model = model_of(backend, tiny)
    alone, together = Looped(runner_of(model)), Looped(runner_of(model))
    alone.run(*others)
    order = [*some, *others]
    random.Random(seed).shuffle(order)
    together.run(*order)
    check_valid(together, some)
    for request in others:
        assert_alike(together.everything(request.id), alone.everything(request.id))
    assert together.runner.statistics().kv_bytes == 0


@pytest.mark.parametrize("backend", ["ahead", "padded", "paged"])
def test_a_constrained_row_is_the_same_with_every_backend_and_beside_others(tiny: Tiny, backend: str) -> None:
    some, others = mixed(3, 6)
    lone, model = Looped(runner_of(model_of("contiguous", tiny)), max_running=1), model_of(backend, tiny)
    if backend == "paged":
        lone = Looped(runner_of(model), max_running=1)
    lone.run(*some)
    loop = Looped(runner_of(model), max_running=7)
    loop.run(*some, *others)
    for request in some:
        assert_alike(loop.everything(request.id), lone.everything(request.id))
