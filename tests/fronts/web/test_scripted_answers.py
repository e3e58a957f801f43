"""Scripted answers in one event loop: each request gets its own, in the steps that the test chose."""

from __future__ import annotations

import openai
import pytest

from tests.fronts.rpc.worker import worker
from tests.fronts.web.server import front, on_port
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.asgi import post
from tests.support.bytes_text import bytes_text

TEXT = bytes_text(added=("<tool_call>", "</tool_call>"), special=("[TOOL_CALLS]",))


@pytest.mark.parametrize("steps", [(1,), (2,), (5, 1), (100,)])
@in_loop
async def test_the_tokens_come_in_the_chosen_steps(steps: tuple[int, ...]) -> None:
    answers = Answers(TEXT, "<tool_call>abcdefghij</tool_call>", steps=steps)
    body = {"prompt": "hi", "stream": True, "max_tokens": 40, "return_token_ids": True}
    async with front(answers, text=TEXT, pump=False) as f:
        client = post("/v1/completions", body).start(f.app)
        while not client.complete:
            await f.step()  # one at a time: tokens that are not read yet come together
    choices = [event["choices"][0] for event in client.events[:-1]]
    sizes = [len(choice["token_ids"]) for choice in choices if choice["token_ids"]]
    expected: list[int] = []
    while sum(expected) < 12:
        expected.append(min(steps[len(expected) % len(steps)], 12 - sum(expected)))
    assert sizes == expected
    assert "".join(choice["text"] for choice in choices) == "<tool_call>abcdefghij</tool_call>"


@in_loop
async def test_answers_go_by_the_prompt_or_else_in_order() -> None:
    answers = Answers(TEXT, "one", "two", by_prompt={"weather": "[TOOL_CALLS]sun"})
    async with front(answers, text=TEXT) as f:
        texts = []
        for prompt in ("a", "b", "the weather", "c"):
            answer = (await f.complete(prompt=prompt, max_tokens=20)).json["choices"][0]
            texts.append((answer["text"], answer["finish_reason"]))
    assert texts == [("one", "stop"), ("two", "stop"), ("sun", "stop"), ("two", "stop")]
    assert [bytes(request.prompt) for request in answers.requests] == [b"a", b"b", b"the weather", b"c"]


@in_loop
async def test_a_limit_cuts_a_step_that_is_longer() -> None:
    answers = Answers(TEXT, "abcdefgh", steps=(3,))
    async with front(answers, text=TEXT) as f:
        answer = (await f.complete(max_tokens=4, logprobs=0)).json["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("abcd", "length")
    assert len(answer["logprobs"]["token_logprobs"]) == 4


@in_loop
async def test_the_same_answers_are_served_over_grpc_and_on_a_port() -> None:
    async with worker(Answers(TEXT, "abc", steps=(2,)), text=TEXT) as scene:
        answer = await scene.vllm.answer(max_tokens=9)
        assert answer.tokens == b"abc"
    async with (
        front(Answers(TEXT, "abc"), text=TEXT) as f,
        on_port(f.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client,
    ):
        messages = [{"role": "user", "content": "hi"}]
        said = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
        assert said.choices[0].message.content == "abc"
