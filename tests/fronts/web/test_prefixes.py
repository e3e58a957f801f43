"""What a client, and an operator, see of the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fronts.web.server import Front, forever, front
from tests.support.aio import in_loop
from tests.support.asgi import Client, post

PROMPT = "You are a helpful assistant. Answer in one word."
RESET = "/v1/prefix_cache/reset"


def cached(client: Client, stream: bool = False) -> int:
    usage = client.events[-2]["usage"] if stream else client.json["usage"]
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


async def ask(f: Front, stream: bool, **fields: Any) -> Client:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return await f.complete(max_tokens=1, **fields, **options)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_usage_says_what_was_reused(stream: bool) -> None:
    async with front(prefix_cache=True) as f:
        assert cached(await ask(f, stream, prompt=PROMPT + " Sky?"), stream) == 0
        assert cached(await ask(f, stream, prompt=PROMPT + " Sea?"), stream) == len(PROMPT + " S")
        assert cached(await ask(f, stream, prompt=PROMPT), stream) == len(PROMPT) - 1
        assert f.idle()


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_chat_says_it_too(stream: bool) -> None:
    async with front(prefix_cache=True) as f:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        turns = [{"role": "user", "content": "hi"}]
        first = await f.chat(messages=turns, **options)
        turns += [{"role": "assistant", "content": "The answer."}, {"role": "user", "content": "why?"}]
        second = await f.chat(messages=turns, **options)
        assert cached(first, stream) == 0
        usage = second.events[-2]["usage"] if stream else second.json["usage"]
        assert 0 < cached(second, stream) < usage["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_choices_of_one_prompt_count_once_and_prompts_each(stream: bool) -> None:
    """Never more than there are prompt tokens: choices share a prompt, which usage counts once."""
    async with front(prefix_cache=True, running=8) as f:
        await ask(f, False, prompt=["abcdef", "uvwxyz"])
        client = await ask(f, stream, prompt=["abcd", "uv"], n=3)
        assert cached(client, stream) == 3 + 1
        assert cached(await ask(f, stream, prompt="new one", n=2), stream) == 0


@in_loop
async def test_a_scored_prompt_is_computed_whole() -> None:
    async with front(prefix_cache=True) as f:
        for _ in range(2):
            client = await f.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
            assert cached(client) == 0
            assert len(client.json["choices"][0]["logprobs"]["tokens"]) == len(PROMPT) + 1


@in_loop
async def test_what_one_key_asked_is_not_there_for_another() -> None:
    """F6: whether a prompt is cached shows in usage, and in time."""
    async with front(prefix_cache=True) as f:

        async def by(key: str, salt: str | None = None) -> int:
            body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
            return cached(await f.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"}))

        assert [await by("a"), await by("b"), await by("a", "s")] == [0, 0, 0]
        assert [await by("a"), await by("b"), await by("a", "s")] == [len(PROMPT) - 1] * 3


@in_loop
async def test_status_shows_it() -> None:
    async with front(prefix_cache=True) as f:
        for _ in range(2):
            await ask(f, False, prompt=PROMPT)
        size = len(PROMPT)
        shown = (await f.get("/v1/status")).json["prefix_cache"]
        assert (shown["enabled"], shown["looked_up_tokens"], shown["reused_tokens"]) == (True, 2 * size, size - 1)
        assert shown["hit_rate"] == pytest.approx((size - 1) / (2 * size), abs=1e-6)
        assert shown["held_bytes"] == 10 * shown["held_tokens"]
        text = (await f.get("/metrics")).body.decode()
        assert f"treadle_prefix_cache_reused_tokens_total {size - 1}.0" in text
        assert f"treadle_cached_tokens_total {size - 1}.0" in text


@in_loop
async def test_a_running_request_shows_what_it_reused() -> None:
    async with front(forever, prefix_cache=True, pump=False) as f:
        for _ in range(2):
            client = post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1000}).start(f.app)
            await f.step(6)
            (request,) = (await f.get("/v1/status")).json["requests"]
            client.leave()
            await f.step(2)
            assert client.task is not None
            await client.task
        assert request["cached_tokens"] == len(PROMPT) - 1


@in_loop
async def test_reset_drops_it_and_says_how_much() -> None:
    async with front(prefix_cache=True) as f:
        await ask(f, False, prompt=PROMPT)
        client = await f.post(RESET, {})
        assert client.status == 200
        assert client.json["dropped_tokens"] >= len(PROMPT)
        assert (await f.post(RESET, b"")).json == {"dropped_tokens": 0}
        assert cached(await ask(f, False, prompt=PROMPT)) == 0


@in_loop
async def test_without_a_cache_there_is_nothing_to_drop() -> None:
    async with front() as f:
        assert (await f.post(RESET, {})).json == {"dropped_tokens": 0}
        shown = (await f.get("/v1/status")).json["prefix_cache"]
        assert (shown["enabled"], shown["hit_rate"], shown["held_tokens"]) == (False, 0.0, 0)


@in_loop
async def test_reset_needs_the_key_and_an_engine() -> None:
    async with front(prefix_cache=True, api_key="k") as f:
        assert (await f.post(RESET, {})).status == 401
        await f.engine.stop()
        gone = await f.post(RESET, {}, headers={"x-api-key": "k"})
        assert gone.status == 503
        assert (await f.get(RESET, headers={"x-api-key": "k"})).status == 405
