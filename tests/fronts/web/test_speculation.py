"""Requests that say what they expect, or want no drafts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fronts.web.server import front
from tests.fronts.web.test_bad_input import refused
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.bytes_text import bytes_text

HI = [{"role": "user", "content": "hi"}]
ANSWER = "def f(x): return x"
EXPECTED = {"type": "content", "content": ANSWER}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def ids(text: str) -> tuple[int, ...]:
    return tuple(bytes_text().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("size", ["small", "large"])
@in_loop
async def test_a_prediction_reaches_every_choice(size: str) -> None:
    """Large bodies are read by a text worker alone."""
    more = {} if size == "small" else {"metadata": {"filler": "x" * 70_000}}
    async with front() as f:
        parts = [{"type": "text", "text": "def f"}, {"type": "text", "text": "(x)"}]
        for content, expected in ((ANSWER, ids(ANSWER)), (parts, ids("def f(x)")), ("", ())):
            client = await f.chat(prediction={"type": "content", "content": content}, n=2, max_tokens=2, **more)
            assert client.status == 200, client.body
            assert [request.prediction for request in f.runner.seen[-2:]] == [expected] * 2
        await f.chat(tools=[{"type": "function", "function": {"name": "g"}}], prediction=EXPECTED, logprobs=True)
        assert f.runner.seen[-1].prediction == ids(ANSWER)


@in_loop
async def test_a_prediction_that_no_answer_could_be_is_refused() -> None:
    async with front(context=100) as f:
        for length, says in ((101, "has 101 tokens"), (100_000, "has over 100 tokens")):
            client = await f.chat(prediction={"type": "content", "content": "x" * length})
            refused(client, 400, "prediction", f"prediction {says} and the model's context is 100: shorten it")
        refused(await f.chat(prediction={"type": "content", "content": "\ud800"}), 400, "prediction.content")
        assert not f.runner.seen


@in_loop
async def test_usage_counts_the_draft_tokens_of_a_request_with_a_prediction() -> None:
    text = bytes_text()
    async with front(Answers(text, ANSWER, steps=(3,)), text=text) as f:
        whole, plain = await f.chat(prediction=EXPECTED), await f.chat()
        stream = await f.chat(prediction=EXPECTED, **STREAMED)
        drafted = [counts_of(usage) for usage in (whole.json["usage"], stream.events[-2]["usage"])]
        assert drafted[0] == drafted[1]
        assert 0 < drafted[0][0] < len(ids(ANSWER))
        assert plain.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert whole.json["choices"] == plain.json["choices"]


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
@in_loop
async def test_usage_counts_draft_tokens_also_where_nothing_is_expected(content: Any) -> None:
    """A client that edits an empty file reads the same fields as others."""
    async with front() as f:
        prediction = {"type": "content", "content": content}
        whole, stream = await f.chat(prediction=prediction), await f.chat(prediction=prediction, **STREAMED)
        assert counts_of(whole.json["usage"]) == counts_of(stream.events[-2]["usage"]) == (0, 0)


@pytest.mark.parametrize(("stop", "counts"), [("d", (1, 2)), ("f(", (5, 1)), ("x)", (6, 0))])
@in_loop
async def test_drafts_behind_a_stop_string_are_not_accepted_ones_of_the_answer(
    stop: str, counts: tuple[int, int]
) -> None:
    """Steps of four tokens: three drafts, and the one behind them."""
    text = bytes_text()
    async with front(Answers(text, ANSWER, steps=(4,)), text=text) as f:
        whole = await f.chat(prediction=EXPECTED, stop=stop)
        usage = whole.json["usage"]
        assert whole.json["choices"][0]["message"]["content"] == ANSWER[: ANSWER.index(stop)]
        assert (usage["completion_tokens"], counts_of(usage)) == (ANSWER.index(stop) + len(stop), counts)


def counts_of(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"model": "m", "input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
        ("/api/chat", {"messages": HI}),
        ("/api/generate", {"prompt": "hi"}),
    ],
)
@in_loop
async def test_a_request_can_do_without_drafts(path: str, fields: dict[str, Any]) -> None:
    async with front() as f:
        for given, speculates in ((False, False), (True, True), (None, True)):
            client = await f.post(path, {**fields, "speculate": given})
            assert client.status == 200, client.body
            assert f.runner.seen[-1].speculate is speculates
        assert (await f.post(path, {**fields, "speculate": "no"})).status == 400
