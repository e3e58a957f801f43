"""Counts of an input's tokens: always those that the response to the same request reports."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.fronts.web.responses.calls import CALL, PATH, WEATHER, answering, respond, user
from tests.fronts.web.server import Front, front, on_port, says
from tests.fronts.web.test_images import INPUT, seeing, turn
from tests.support.aio import in_loop
from tests.support.asgi import Client
from tests.support.bytes_text import bytes_text

COUNT = f"{PATH}/input_tokens"
STRICT = {**WEATHER, "strict": True}
SCHEMA = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "sun"}
CALLED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'}
LONG = "x" * 70_000


async def count(f: Front, given: Any = "hi", **fields: Any) -> int:
    client = await f.post(COUNT, {"model": "m", "input": given, **fields})
    assert client.status == 200, client.body
    assert client.json == {"object": "response.input_tokens", "input_tokens": client.json["input_tokens"]}
    return int(client.json["input_tokens"])


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("hi", {}),
        ("hi", {"instructions": "Be brief.", "stream": True, "background": True}),
        ([user("hi"), CALLED, RESULT], {"tools": [STRICT], "tool_choice": "required"}),
        ("hi", {"tools": [WEATHER], "tool_choice": "none", "parallel_tool_calls": False}),
        ("hi", {"reasoning": {"effort": "low"}, "text": SCHEMA}),
        ("hi", {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": False}}),
        ([user("hi"), {"type": "compaction_trigger"}], {"tools": [WEATHER]}),
        (LONG, {"instructions": "Be brief."}),
        ([user("a"), user("b")], {"truncation": "auto"}),
    ],
)
@in_loop
async def test_a_count_is_what_the_response_reports(given: Any, fields: dict[str, Any]) -> None:
    async with answering("Hello.") as f:
        counted = await count(f, given, **fields)
        answer = {name: value for name, value in fields.items() if name not in ("stream", "background")}
        assert (await respond(f, given, **answer))["usage"]["input_tokens"] == counted


@in_loop
async def test_what_is_stored_is_counted_with_the_input() -> None:
    async with answering(f"<think>2+2</think>Look.\n{CALL}", "Sunny.") as f:
        first = await respond(f, [user("hi")], tools=[WEATHER], instructions="Be brief.")
        item = {"type": "item_reference", "id": first["output"][-1]["id"]}
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sun"}
        for given, fields in (([result], {"previous_response_id": first["id"]}), ([user("hi"), item, result], {})):
            counted = await count(f, given, tools=[WEATHER], **fields)
            second = await respond(f, given, tools=[WEATHER], **fields)
            assert counted == second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@in_loop
async def test_a_count_stores_nothing_takes_no_slot_and_needs_no_engine() -> None:
    async with front(says("Hi.")) as f:
        f.engine.admission.capabilities = None
        assert await count(f) > 2
        assert (await f.get("/v1/status")).json["responses"]["stored"] == 0
        assert f.engine.gate.rows == 0
        assert not f.runner.seen


@in_loop
async def test_an_input_beyond_the_context_is_counted_and_a_cut_one_as_it_is_cut() -> None:
    text = bytes_text(context=2000)
    async with front(text=text) as f:
        turns = [user("x" * 200) for _ in range(20)]
        assert await count(f, turns) > 4000
        cut = await count(f, turns, truncation="auto", max_output_tokens=50)
        answer = await respond(f, turns, truncation="auto", max_output_tokens=50)
        assert cut == answer["usage"]["input_tokens"] <= 1950
        for given in ("x" * 20_000, "x" * 31_000):
            assert await count(f, given) > 20_000
        hopeless = await f.post(COUNT, {"model": "m", "input": "x" * 70_000})
        assert (hopeless.status, hopeless.json["error"]["param"]) == (400, "input")
        assert "maximum context length is 2000 tokens" in hopeless.json["error"]["message"]
        single = await f.post(COUNT, {"model": "m", "input": "x" * 20_000, "truncation": "auto"})
        assert "length is 2000 tokens. However, your messages resulted in more than 2000 " in single.body.decode()


@in_loop
async def test_images_are_counted() -> None:
    async with seeing() as (f, _):
        counted = await count(f, [turn(INPUT)])
        assert (await f.post(PATH, {"model": "m", "input": [turn(INPUT)]})).json["usage"]["input_tokens"] == counted
        assert counted > await count(f, [turn({"type": "input_text", "text": ""})])


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"temperature": 9}, 400, "temperature"),
        ({"made_up": 1}, 400, "made_up"),
        ({"conversation": "c"}, 400, "conversation"),
    ],
)
@in_loop
async def test_bad_requests_are_refused_by_the_field_as_for_responses(
    fields: dict[str, Any], status: int, param: str
) -> None:
    async with front() as f:
        for path in (COUNT, PATH):
            client = await f.post(path, {"model": "m", "input": "hi", **fields})
            assert (client.status, client.json["error"]["param"]) == (status, param)


@in_loop
async def test_the_path_is_no_stored_response() -> None:
    async with front() as f:
        for method in ("GET", "DELETE"):
            client = await Client(method, COUNT).run(f.app)
            assert (client.status, client.headers["allow"]) == (405, "POST")


@in_loop
async def test_the_official_sdk_counts() -> None:
    tools: Any = [STRICT]
    async with (
        answering("Hello.") as f,
        on_port(f.app) as base,
        openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client,
    ):
        counted = await client.responses.input_tokens.count(model="m", input="hi", tools=tools)
        found = await client.responses.create(model="m", input="hi", tools=tools)
        least = await client.responses.input_tokens.count(input="hi", tools=tools, personality="friendly")
    assert counted.object == "response.input_tokens"
    assert found.usage is not None
    assert counted.input_tokens == least.input_tokens == found.usage.input_tokens
