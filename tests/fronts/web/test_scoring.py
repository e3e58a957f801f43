"""Prompts that are scored: `echo` with `logprobs`, as evaluation harnesses read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.fronts.runner import prompt_score
from tests.fronts.web.server import forever, front, says
from tests.support.aio import in_loop
from tests.support.asgi import Client
from tests.support.bytes_text import EOS, bytes_text
from tests.support.tiny import BOS, IM_START
from treadle.core.messages import TokenLogprob
from treadle.fronts.web.openai.echo import echo_ids, echo_logprobs, echo_text

NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def scores(prompt: Sequence[int], top: int) -> list[float | None]:
    """What the scripted runner says of a prompt."""
    return [None, *(prompt_score(prompt, at, top).logprob for at in range(1, len(prompt)))]


def choices(client: Client, stream: bool) -> list[dict[str, Any]]:
    """The choices of an answer; a stream's are put together of their chunks, lists end to end."""
    if not stream:
        return [dict(choice) for choice in client.json["choices"]]
    found: dict[int, dict[str, Any]] = {}
    for event in client.events[:-1]:
        new = event["choices"][0]
        whole = found.setdefault(new["index"], {"index": new["index"], "text": "", "logprobs": {}})
        whole["text"] += new["text"]
        whole["finish_reason"] = new["finish_reason"]
        for name in NAMES if new["logprobs"] else ():
            whole["logprobs"].setdefault(name, []).extend(new["logprobs"][name])
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), [list(b"hello")]], ids=["text", "ids", "lists"])
@in_loop
async def test_max_tokens_0_scores_the_prompt_alone(prompt: Any, stream: bool) -> None:
    async with front() as f:
        client = await f.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=0, stream=stream)
        (choice,) = choices(client, stream)
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == list("hello")
        assert logprobs["token_logprobs"] == scores(b"hello", 2)
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
        assert logprobs["top_logprobs"][0] is None
        for at, top in enumerate(logprobs["top_logprobs"][1:], 1):
            assert top["hello"[at]] == logprobs["token_logprobs"][at]
        assert f.idle()
        assert f.runner.seen[0].max_tokens == 0


@in_loop
async def test_a_scored_prompt_uses_no_completion_tokens() -> None:
    async with front() as f:
        client = await f.complete(prompt="hello", echo=True, logprobs=0, max_tokens=0)
        usage = client.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)
        assert client.json["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_the_answers_log_probabilities_follow_the_prompts(stream: bool) -> None:
    async with front(says("yes.")) as f:
        client = await f.complete(prompt="ok? ", echo=True, logprobs=1, max_tokens=3, stream=stream)
        (choice,) = choices(client, stream)
        assert (choice["text"], choice["finish_reason"]) == ("ok? yes", "length")
        assert choice["logprobs"]["tokens"] == list("ok? yes")
        assert choice["logprobs"]["token_logprobs"] == [*scores(b"ok? ", 1), -0.5, -0.5, -0.5]
        assert choice["logprobs"]["text_offset"] == list(range(7))
        assert choice["logprobs"]["top_logprobs"][4:] == [{"y": -0.5}, {"e": -0.5}, {"s": -0.5}]
        if stream:
            first = client.events[0]["choices"][0]
            assert (first["text"], first["logprobs"]["tokens"]) == ("ok? ", list("ok? "))


@pytest.mark.parametrize(
    ("token", "shown"),
    [(ord("x"), "x"), (EOS, ""), (IM_START, ""), (0xC3, "\ufffd")],
    ids=["text", "end", "special", "half"],
)
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_one_entry_for_each_token_whatever_the_token_shows(token: int, shown: str, stream: bool) -> None:
    """lm-evaluation-harness asks for one token and drops the last entry: a token without one would cost the prompt's
    last."""
    async with front(lambda request, position: token) as f:
        prompts = [list(b"The sky is"), list(b"a")]
        fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
        answers = choices(await f.complete(**fields, stream=stream), stream)
        assert [choice["index"] for choice in answers] == [0, 1]
        for prompt, choice in zip(prompts, answers, strict=True):
            assert choice["text"] == bytes(prompt).decode() + shown
            logprobs = choice["logprobs"]
            assert {name: len(logprobs[name]) for name in NAMES} == dict.fromkeys(NAMES, len(prompt) + 1)
            assert logprobs["token_logprobs"][:-1] == scores(prompt, 1)
            assert all(
                max(top.values()) >= p
                for top, p in zip(logprobs["top_logprobs"][1:], logprobs["token_logprobs"][1:], strict=True)
            )
            assert logprobs["text_offset"][-1] == len(prompt)
        assert f.idle()


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_every_choice_has_its_prompt_before_it(stream: bool) -> None:
    async with front(says("ab")) as f:
        client = await f.complete(prompt=["x", "yz"], n=2, echo=True, logprobs=1, stream=stream)
        answers = choices(client, stream)
        assert [choice["text"] for choice in answers] == ["xab", "xab", "yzab", "yzab"]
        assert [choice["logprobs"]["tokens"][:-1] for choice in answers] == [list("xab")] * 2 + [list("yzab")] * 2
        assert f.idle()


@in_loop
async def test_echo_alone_asks_for_no_scores() -> None:
    async with front() as f:
        client = await f.complete(prompt="hello", echo=True, max_tokens=0)
        assert client.json["choices"][0]["text"] == "hello"
        assert client.json["choices"][0]["logprobs"] is None
        await f.complete(prompt="hello", logprobs=3)
        assert [request.prompt_logprobs for request in f.runner.seen] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_prompt_may_fill_the_context_where_nothing_follows(stream: bool) -> None:
    async with front(context=64) as f:
        fields = {"prompt": [97] * 64, "echo": True, "logprobs": 1, "stream": stream}
        (choice,) = choices(await f.complete(**fields, max_tokens=0), stream)
        assert choice["logprobs"]["token_logprobs"] == scores([97] * 64, 1)
        assert (await f.complete(**fields, max_tokens=1)).json["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_long_scores_are_the_same_scores(stream: bool) -> None:
    """Written on a thread; the runner gives them in many steps."""
    async with front() as f:
        prompt = [i % 95 + 32 for i in range(900)]
        client = await f.complete(prompt=prompt, echo=True, logprobs=5, max_tokens=0, stream=stream)
        (choice,) = choices(client, stream)
        assert choice["logprobs"]["token_logprobs"] == scores(prompt, 5)
        assert choice["logprobs"]["tokens"] == list(bytes(prompt).decode())


@in_loop
async def test_counts_do_not_decrease_where_a_long_prompt_is_written_on_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other choice goes on meanwhile."""
    behind: list[int] = []

    async def slowly(encode: Callable[..., bytes], *parts: Any) -> bytes:
        done = encode(*parts)
        (short,) = [g for g in f.engine.dispatch.generations if len(g.request.prompt) == 1]
        read = short.completion_tokens
        while short.completion_tokens < read + 20:
            await asyncio.sleep(0)
        behind.append(read)
        return done

    monkeypatch.setattr("treadle.fronts.web.answer.asyncio.to_thread", slowly)
    async with front(forever) as f:
        options = {"include_usage": True, "continuous_usage_stats": True}
        prompts = [[i % 95 + 32 for i in range(900)], [97]]
        fields = {"echo": True, "logprobs": 5, "stream": True, "stream_options": options}
        client = await f.complete(prompt=prompts, max_tokens=200, **fields)
        seen = [event["usage"]["completion_tokens"] for event in client.events[:-1]]
        assert seen == sorted(seen)
        assert (seen[-1], len(behind)) == (400, 1)


@in_loop
async def test_too_many_scores_are_refused_in_the_words_of_the_request() -> None:
    async with front(context=100_000) as f:
        client = await f.complete(prompt=[97] * 60_000, echo=True, logprobs=20, max_tokens=0)
        assert (client.status, client.json["error"]["param"]) == (400, "logprobs")
        assert "prompt_logprobs" not in client.json["error"]["message"]
        assert f.idle()


def test_offsets_point_into_the_text_that_is_shown() -> None:
    model = replace(bytes_text(), prefix=(BOS,))
    text = "é!"
    echo = echo_text(text, [BOS, *text.encode()], model, special=True)
    assert (echo.text, list(echo.offsets)) == (text, [0, 0, 0, 1])
    shown = echo_ids([BOS, *text.encode(), IM_START], model, skip_special_tokens=True)
    assert (shown.text, list(shown.offsets)) == (text, [0, 0, 0, 1, 2])
    whole = echo_ids([IM_START, *b"a"], model, skip_special_tokens=False)
    assert (whole.text, list(whole.offsets)) == ("<|im_start|>a", [0, 12])


def test_offsets_stay_within_a_text_that_the_tokenizer_changed() -> None:
    """A normalizer may make a text longer than it came."""
    echo = echo_text("ab", list(b"abcd"), bytes_text(), special=False)
    assert list(echo.offsets) == [0, 1, 2, 2]


def test_an_impossible_token_is_no_infinity() -> None:
    echo = echo_ids(list(b"ab"), bytes_text(), skip_special_tokens=True)
    logprobs = echo_logprobs(echo, [TokenLogprob(logprob=float("-inf"))], bytes_text(), top=False)
    assert logprobs["token_logprobs"] == [None, -9999.0]
