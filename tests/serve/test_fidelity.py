"""Over HTTP: together = alone = mlx-lm's own generation, token for token; a seed gives one answer in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve
from tests.support.tiny import Architecture
from treadle.runner.loading.loader import load

ARCHITECTURES: list[Architecture] = ["gemma3", "qwen3"]
LENGTHS = (1, 2, 7, 19, 33, 64, 150, 700)
NEW_TOKENS = 40
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "max_tokens": 30}


def prompts() -> list[list[int]]:
    """Of 1 to 700 tokens: below and far beyond gemma3's window of 32 and a step's prefill budget."""
    dice = random.Random(7)
    return [[dice.randrange(32, 127) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def servers(start_shared: Start, tiny: Tiny) -> Callable[[Architecture], Serve]:
    """One server for each architecture, all starting at once."""
    known = {architecture: start_shared(tiny(architecture)) for architecture in ARCHITECTURES}
    return lambda architecture: known[architecture].ready()


def at_once(ask: Callable[[Any], Any], things: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(things)) as threads:
        return list(threads.map(ask, things))


def tokens(answer: Any) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def reference(folder: Path, prompt: Sequence[int]) -> list[int]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps: Any = generate_step(mx.array([*prompt]), load(folder).module, max_tokens=NEW_TOKENS)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_together_is_alone_is_mlx_lm(
    servers: Callable[[Architecture], Serve], tiny: Tiny, architecture: Architecture
) -> None:
    server = servers(architecture)

    def greedy(prompt: list[int]) -> list[int]:
        (row,) = tokens(server.complete(prompt, max_tokens=NEW_TOKENS))
        return row

    together = at_once(greedy, prompts())
    assert together == [greedy(prompt) for prompt in prompts()]
    assert together == [reference(tiny(architecture), prompt) for prompt in prompts()]
    assert len({tuple(row) for row in together}) == len(LENGTHS), "the prompts do not tell answers apart"
    server.idle()


def test_one_request_with_many_prompts_is_each_alone(servers: Callable[[Architecture], Serve]) -> None:
    server = servers("gemma3")
    together = tokens(server.http.post(f"{server.url}/v1/completions", json=_many(prompts())))
    assert together == [tokens(server.complete(prompt, max_tokens=NEW_TOKENS))[0] for prompt in prompts()]


def _many(prompts: list[list[int]]) -> dict[str, Any]:
    return {"prompt": prompts, "max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}


def test_a_stream_says_what_the_whole_answer_says(servers: Callable[[Architecture], Serve]) -> None:
    server = servers("qwen3")
    (whole,) = tokens(server.complete("tell me", max_tokens=NEW_TOKENS))
    with server.stream("tell me", max_tokens=NEW_TOKENS) as stream:
        assert stream.rest().tokens == whole
        assert stream.done


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_seed_gives_the_same_alone_and_in_a_batch(
    servers: Callable[[Architecture], Serve], architecture: Architecture
) -> None:
    server = servers(architecture)

    def sampled(seed: int) -> list[int]:
        (row,) = tokens(server.complete(f"prompt {seed}", seed=seed, **SAMPLED))
        return row

    seeds = range(8)
    together = at_once(sampled, seeds)
    assert together == [sampled(seed) for seed in seeds]
    assert len({tuple(row) for row in together}) == len(together)


def test_two_choices_with_a_seed_are_two_and_reproducible(servers: Callable[[Architecture], Serve]) -> None:
    server = servers("gemma3")
    first, second = tokens(server.complete("again", n=2, seed=5, **SAMPLED))
    assert first != second
    others = at_once(lambda seed: tokens(server.complete("other", seed=seed, **SAMPLED)), range(3))
    assert len(others) == 3
    assert tokens(server.complete("again", n=2, seed=5, **SAMPLED)) == [first, second]


def test_without_a_seed_two_answers_differ(servers: Callable[[Architecture], Serve]) -> None:
    server = servers("gemma3")
    assert tokens(server.complete("again", **SAMPLED)) != tokens(server.complete("again", **SAMPLED))


def test_the_sdk_reads_what_the_wire_says(servers: Callable[[Architecture], Serve]) -> None:
    """Stream and whole, n=2, log-probabilities, stop, and a typed error."""
    server = servers("qwen3")
    messages: Any = [{"role": "user", "content": "hello"}]
    common: dict[str, Any] = {"model": "qwen3", "messages": messages, "temperature": 0, "max_tokens": 12}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=2, n=2)
        one, two = whole.choices
        assert one.message.content == two.message.content
        assert one.finish_reason == "length"
        assert whole.usage.completion_tokens == 24
        assert len(one.logprobs.content) == 12
        assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in one.logprobs.content)
        with client.chat.completions.create(**common, stream=True) as stream:
            pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(pieces) == one.message.content
        stop = next(c for c in one.message.content if c.isascii())
        stopped = client.chat.completions.create(**common, stop=stop).choices[0]
        assert stopped.message.content == one.message.content.partition(stop)[0]
        assert stopped.finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**common | {"temperature": 9})
