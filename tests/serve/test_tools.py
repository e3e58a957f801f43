"""Tools and structured output through a real server and the official SDK. The model has random weights: the form of
its answers comes from the grammar alone."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.serve.conftest import Start, Tiny
from tests.serve.server import Serve


class Place(pydantic.BaseModel):
    city: str
    people: int
    capital: bool


TOOL = openai.pydantic_function_tool(Place, name="place", description="A place.")
COMMON: dict[str, Any] = {
    "model": "llama",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 200,
    "extra_body": {"close_at_limit": True},
}


@pytest.fixture(scope="module")
def server(start_shared: Start, tiny: Tiny) -> Serve:
    return start_shared(tiny("llama"), "--served-model-name", "llama").ready()


def client_of(server: Serve) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, timeout=60.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_followed_to_its_end(server: Serve, seed: int) -> None:
    with client_of(server) as client:
        said = client.chat.completions.parse(**COMMON, seed=seed, response_format=Place)
        assert said.choices[0].message.parsed is not None
        assert said.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "place"}}], ids=str)
def test_a_forced_call_is_made(server: Serve, choice: Any) -> None:
    with client_of(server) as client:
        forced: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        said = client.chat.completions.parse(**COMMON, **forced)
        (call,) = said.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Place)
        assert (said.choices[0].finish_reason, said.choices[0].message.content) == ("tool_calls", None)
        with client.chat.completions.stream(**COMMON, **forced) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        (call,) = final.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Place)


def test_completions_follow_a_choice_and_a_pattern(server: Serve) -> None:
    with client_of(server) as client:
        given: dict[str, Any] = {"model": "llama", "prompt": "hi", "max_tokens": 40}
        outputs: dict[str, Any] = {"choice": ["red", "green"]}
        said = client.completions.create(**given, extra_body={"structured_outputs": outputs})
        assert said.choices[0].text in ("red", "green")
        said = client.completions.create(**given, extra_body={"guided_regex": "[0-9]{3}-[0-9]{4}"})
        assert len(said.choices[0].text) == 8


def chat(server: Serve, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60.0)


def bodies() -> list[tuple[str, dict[str, Any]]]:
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]
    return [
        ("tools", {"tools": tools}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}}),
        ("guided_regex", {"guided_regex": "(a{0,900}){0,900}"}),
        ("guided_grammar", {"guided_grammar": "start: " + '"a" ' * 250_000}),
        ("guided_json", {"guided_json": {"type": "object", "properties": {"x": {"$ref": "http://x/y"}}}}),
    ]


@pytest.mark.parametrize(("place", "fields"), bodies(), ids=lambda value: str(value)[:30])
def test_bad_input_is_refused_in_a_second_by_its_place(server: Serve, place: str, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    answer = chat(server, **fields)
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(place)
    assert time.monotonic() - began < 20.0  # one on a machine of its own
    assert server.complete("hi", max_tokens=1).status_code == 200


def test_without_grammars_a_model_may_still_call(start: Start, tiny: Tiny) -> None:
    """Clients such as Open WebUI send tools with every request."""
    server = start(tiny("llama"), "--structured", "off").ready()
    tool = json.loads(json.dumps(TOOL))
    tool["function"].pop("strict", None)
    assert chat(server, tools=[tool], max_tokens=5).status_code == 200
    refused = chat(server, tools=[tool], tool_choice="required", max_tokens=5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_grammar")
