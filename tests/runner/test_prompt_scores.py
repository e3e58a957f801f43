"""Log-probabilities of prompts, with and without tokens after them."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from tests.runner.conftest import Tiny
from tests.runner.looped import Looped
from tests.runner.reference import reference
from treadle.core.messages import FinishReason, Submit, TokenLogprob
from treadle.runner.loading.model import LoadedModel
from treadle.runner.model_runner import ModelRunner


def log_softmax(model: LoadedModel, tokens: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Log-probabilities (n, V) after each of `tokens`, of the plain model over all of them at once."""
    logits = np.array(model.module(mx.array([tokens]))[0]).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def scores(loop: Looped, id_: str) -> list[TokenLogprob]:
    return [one for output in loop.outputs[id_] for one in output.prompt_logprobs]


def assert_scores(model: LoadedModel, prompt: tuple[int, ...], found: list[TokenLogprob], count: int) -> None:
    wanted = log_softmax(model, prompt)
    assert len(found) == len(prompt) - 1
    for i, one in enumerate(found):
        assert one.logprob == pytest.approx(wanted[i, prompt[i + 1]], abs=1e-3)
        assert [token for token, _ in one.top] == np.argsort(-wanted[i])[:count].tolist()
        assert [value for _, value in one.top] == pytest.approx(sorted(wanted[i])[: -count - 1 : -1], abs=1e-3)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(256) for _ in range(length))


@pytest.mark.parametrize("length", [1, 2, 33, 90])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_they_are_the_models_own(either: Tiny, architecture: str, length: int) -> None:
    """In chunks of 32, beside another row, and the tokens after the prompt are what they are without."""
    model = either(architecture)
    loop = Looped(ModelRunner(model))
    request = Submit(id="a", prompt=prompt_of(length), max_tokens=5, prompt_logprobs=3)
    beside = Submit(id="b", prompt=prompt_of(50, 1), max_tokens=9)
    tokens = loop.run(request, beside)
    assert_scores(model, request.prompt, scores(loop, "a"), 3)
    assert scores(loop, "b") == []
    assert tokens == {one.id: reference(model, one) for one in (request, beside)}


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}, {}], ids=["scored", "not"])
@pytest.mark.parametrize("length", [1, 2, 70])
def test_a_request_for_no_tokens_computes_its_prompt_and_ends(
    either: Tiny, length: int, options: dict[str, Any]
) -> None:
    model = either()
    runner = ModelRunner(model)
    loop = Looped(runner)
    prompt = prompt_of(length)
    assert loop.run(Submit(id="a", prompt=prompt, max_tokens=0, **options)) == {"a": []}
    assert loop.finish("a") is FinishReason.LENGTH
    found = scores(loop, "a")
    if options:
        assert_scores(model, prompt, found, 0)
    else:
        assert found == []
    assert runner.statistics().kv_bytes == 0


def test_a_prompt_that_is_kept_already_is_scored_whole(tiny: Tiny) -> None:
    model = tiny()
    loop = Looped(ModelRunner(model), prefill_tokens=512)
    prompt = prompt_of(100)
    loop.run(Submit(id="first", prompt=prompt, max_tokens=3))
    loop.run(Submit(id="scored", prompt=prompt, max_tokens=3, prompt_logprobs=1))
    loop.run(Submit(id="again", prompt=prompt, max_tokens=3))
    assert_scores(model, prompt, scores(loop, "scored"), 1)
    assert [loop.cached(id_) for id_ in ("first", "scored", "again")] == [0, 0, 99]
