"""Anthropic's and Ollama's own clients against a real server."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import ollama
import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny) -> Serve:
    return start_shared(tiny("llama"), "--require-model").ready()


@pytest.fixture(scope="module")
def model(server: Serve) -> str:
    name: str = server.get("/v1/models").json()["data"][0]["id"]
    return name


def test_anthropics_sdk_creates_streams_and_counts(server: Serve, model: str) -> None:
    turns: Any = [{"role": "user", "content": "hi"}]
    tools: Any = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"enum": ["a", "b"]}}}}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(model=model, max_tokens=8, messages=turns)
        counted = client.messages.count_tokens(model=model, messages=turns)
        with client.messages.stream(model="claude-any", max_tokens=8, messages=turns) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        forced: Any = {"type": "tool", "name": "look"}
        called = client.messages.create(model=model, max_tokens=64, messages=turns, tools=tools, tool_choice=forced)
        listed = client.models.list()
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )
    assert (whole.stop_reason, final.stop_reason) == ("max_tokens", "max_tokens")
    assert "".join(block.text for block in final.content if block.type == "text") == streamed
    assert [block.name for block in called.content if block.type == "tool_use"] == ["look"]
    assert [entry.id for entry in listed.data] == [model]


def test_anthropics_sdk_runs_tools_and_threads_over_whole_conversations(server: Serve, model: str) -> None:
    """Its runner asks for a thread first, and sends every message once that is refused."""
    ran: list[str] = []

    @anthropic.beta_tool
    def look(at: Literal["a", "b"]) -> str:
        """Look somewhere."""
        ran.append(at)
        return "seen"

    turns: Any = [{"role": "user", "content": "hi"}]
    forced: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        some: Any = {"model": model, "max_tokens": 8}
        runner = client.beta.messages.tool_runner(
            model=model, max_tokens=512, messages=turns, tools=[look], tool_choice=forced, max_iterations=3
        )
        answers = list(runner)
        thread = client.beta.messages.thread(**some, unsupported_request_behavior="continue_unthreaded")
        sent = [thread.send({"role": "user", "content": "hi"}).usage for _ in range(2)]
        strict = client.beta.messages.thread(**some)
        with pytest.raises(anthropic.BadRequestError, match="unsupported_request_behavior='continue_unthreaded'"):
            strict.send({"role": "user", "content": "hi"})
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 3, answers
    assert len(ran) == 3
    prompts = [_prompt_tokens(usage) for usage in [*(answer.usage for answer in answers), *sent]]
    assert prompts[0] < prompts[1] < prompts[2]
    assert prompts[3] < prompts[4]


def _prompt_tokens(usage: Any) -> int:
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(part or 0 for part in parts)


def test_ollamas_client_chats_generates_and_embeds(server: Serve, model: str) -> None:
    few, turns = {"num_predict": 8}, [{"role": "user", "content": "hi"}]
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    with ollama.Client(host=server.url) as client:
        parts = list(client.chat(model, turns, stream=True, options=few))
        assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 8)
        assert len(client.generate(f"{model}:latest", "hi", raw=True, options=few).response) > 0
        assert json.loads(client.chat(model, turns, format=schema).message.content or "")["a"] in (1, 2)
        assert len(client.embed(model, ["a", "b"]).embeddings) == 2
        assert model in [entry.model for entry in client.list().models]
        with pytest.raises(ollama.ResponseError, match="not served here"):
            client.chat("nobody", turns)
