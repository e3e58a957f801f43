"""Refusals of prompts that are too long, held to the patterns by which clients recognise them and shorten a
conversation."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fronts.web.server import Front, front, settle
from tests.support.aio import in_loop
from tests.support.asgi import Client

PI = (
    r"reduce the length of the messages",
    r"maximum context length is \d+ tokens",
)
"""Of pi's `utils/overflow.js`, those for OpenAI's words; case is ignored."""
NO_OVERFLOW = (r"^(Throttling error|Service unavailable):", r"rate limit", r"too many requests")
"""Of the same, those that make any message one about something else."""
LITELLM = "this model's maximum context length is"
"""Of LiteLLM's `is_error_str_context_window_exceeded`, in lower case."""
CONTEXT = 64
TURN = "x" * CONTEXT


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


ROUTES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", chat),
    ("/v1/completions", lambda content: {"prompt": content}),
    ("/v1/responses", lambda content: {"model": "m", "input": content}),
    ("/v1/messages", lambda content: {**chat(content), "max_tokens": 5}),
    ("/api/chat", chat),
    ("/api/generate", lambda content: {"prompt": content}),
]


def message_of(client: Client) -> str:
    assert client.status == 400, client.body
    error = client.json["error"]
    return str(error if isinstance(error, str) else error["message"])


def check(message: str) -> None:
    assert all(re.search(pattern, message, re.IGNORECASE) for pattern in PI), message
    assert not any(re.search(pattern, message, re.IGNORECASE) for pattern in NO_OVERFLOW)
    assert LITELLM in message.lower()


@pytest.mark.parametrize(("path", "fields"), ROUTES, ids=[path for path, _ in ROUTES])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("times", [1, 10, 30], ids=["counted", "begun", "estimated"])
@in_loop
async def test_a_prompt_over_the_context_is_refused_in_words_that_clients_know(
    path: str, fields: Any, stream: bool, times: int
) -> None:
    async with front(context=CONTEXT) as f:
        message = message_of(await f.post(path, {**fields(TURN * times), "stream": stream}))
        check(message)
        words = {1: r"\d+", 10: "more than 64", 30: r"about \d+"}
        assert re.search(rf"However, your messages resulted in {words[times]} tokens\.", message), message
        assert message.startswith(("This model's", "prompt is too long: "))
        assert f.idle()


@pytest.mark.parametrize(("path", "fields"), ROUTES, ids=[path for path, _ in ROUTES])
@pytest.mark.parametrize("most", [1, None])
@in_loop
async def test_a_request_over_the_cache_is_refused_in_words_that_clients_know(
    path: str, fields: Any, most: int | None
) -> None:
    limit = {"max_output_tokens": most} if path == "/v1/responses" else {"max_tokens": most or 5}
    async with front(cache_tokens=CONTEXT) as f:
        check(message_of(await f.post(path, {**fields(TURN), **limit})))


@in_loop
async def test_a_response_that_fails_later_does_so_in_the_same_words() -> None:
    async with front(cache_tokens=CONTEXT) as f:
        queued = (
            await f.post("/v1/responses", {"model": "m", "input": TURN, "max_output_tokens": 1, "background": True})
        ).json
        failed = await ended(f, queued["id"])
    assert failed["status"] == "failed"
    check(failed["error"]["message"])


async def ended(f: Front, name: str) -> dict[str, Any]:
    while True:
        await settle()
        found: dict[str, Any] = (await f.get(f"/v1/responses/{name}")).json
        if found["status"] not in ("queued", "in_progress"):
            return found


@in_loop
async def test_an_input_of_embeddings_over_the_context_is_refused_in_words_that_clients_know() -> None:
    async with front(context=CONTEXT) as f:
        client = await f.post("/v1/embeddings", {"input": ["a", TURN + "x"]})
        assert (client.status, client.json["error"]["param"]) == (400, "input[1]")
        assert LITELLM in client.json["error"]["message"].lower()
        assert "input[1] has 65 tokens" in client.json["error"]["message"]
