"""Responses, whole and streamed: output items, tools, formats, reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fronts.web.responses.calls import (
    CALL,
    PATH,
    WEATHER,
    answering,
    events,
    joined,
    kinds,
    output_text,
    prompt_of,
    requests,
    respond,
    send,
    user,
)
from tests.fronts.web.server import Front, front, on_port
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.asgi import post
from tests.support.bytes_text import bytes_text
from treadle.fronts import text_jobs
from treadle.fronts.log_once import LogOnce

CODEX = json.loads(Path(__file__).with_name("codex_request.json").read_text(encoding="utf-8"))
PATCH = {"type": "custom", "name": "patch", "description": "Patches files."}


def grammar_of(f: Front) -> str:
    constraint = requests(f)[-1].constraint
    assert constraint is not None
    return constraint.grammar


@in_loop
async def test_a_text_is_one_message_and_its_usage_is_counted() -> None:
    async with answering("Hello.") as f:
        found = await respond(f, "hi", instructions="Be brief.", metadata={"a": "b"}, user="u")
        (item,) = found["output"]
        assert item["role"] == "assistant"
        assert item["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
        assert (found["status"], found["instructions"], found["metadata"]) == ("completed", "Be brief.", {"a": "b"})
        assert (found["error"], found["incomplete_details"]) == (None, None)
        usage = found["usage"]
        assert usage["output_tokens"] == len("Hello.") + 1
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert prompt_of(f).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
        assert f.idle()


@in_loop
async def test_a_stream_has_every_event_in_order_and_ends_with_the_response() -> None:
    async with answering(f"<think>2+2</think>Let me look.\n{CALL}", steps=(3, 1)) as f:
        found = await events(f, tools=[WEATHER])
        message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
        reasoning = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"]
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        end = ["content_part.done", "output_item.done"]
        begin = ["created", "in_progress"]
        assert kinds(found) == [
            *begin, *reasoning, *end, *message, *end, *call, "output_item.done", "completed"
        ]  # fmt: skip
        assert joined(found, "reasoning_text") == "2+2"
        assert joined(found, "output_text") == "Let me look."
        assert joined(found, "function_call_arguments") == '{"city": "Rome"}'
        assert found[0]["response"]["output"] == []
        assert found[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@in_loop
async def test_a_limit_makes_a_response_incomplete_and_its_last_item_too() -> None:
    async with answering("Hello.", CALL) as f:
        found = await respond(f, max_output_tokens=3)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (found["output"][0]["status"], output_text(found)) == ("incomplete", "Hel")
        streamed = await events(f, tools=[WEATHER], max_output_tokens=40)
        assert streamed[-1]["type"] == "response.incomplete"
        assert streamed[-1]["response"]["output"][0]["status"] == "incomplete"


@in_loop
async def test_an_answer_without_text_is_an_empty_message() -> None:
    async with answering("") as f:
        found = await respond(f)
        assert (found["status"], output_text(found), len(found["output"])) == ("completed", "", 1)


@in_loop
async def test_a_tool_loop_goes_on_from_the_items_that_were_received() -> None:
    async with answering(f"<think>2+2</think>Look.\n{CALL}", "Sunny.") as f:
        first = await respond(f, tools=[WEATHER])
        reasoning, message, call = first["output"]
        assert (call["name"], call["status"]) == ("weather", "completed")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        given = [user("hi"), reasoning, message, call, result]
        assert output_text(await respond(f, given, tools=[WEATHER])) == "Sunny."
        assert prompt_of(f).endswith(
            'Look.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
            "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.parametrize(
    ("choice", "rest"),
    [
        ("required", {}),
        ({"type": "function", "name": "weather"}, {}),
        ("none", {}),
        (None, {"parallel_tool_calls": False}),
    ],
)
@in_loop
async def test_tool_choices_reach_the_grammar(choice: Any, rest: dict[str, Any]) -> None:
    async with answering(CALL) as f:
        found = await respond(f, tools=[WEATHER], tool_choice=choice, **rest)
        constraint = requests(f)[-1].constraint
        assert (constraint is None) == (choice == "none")
        if constraint is not None and choice is not None:
            assert not constraint.triggers
        assert found["tool_choice"] == ("auto" if choice is None else choice)


@in_loop
async def test_allowed_tools_leave_out_the_others() -> None:
    other = {**WEATHER, "name": "clock"}
    async with answering(CALL) as f:
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
        await respond(f, tools=[WEATHER, other], tool_choice=allowed)
        grammar = grammar_of(f)
        assert "weather" in grammar
        assert "clock" not in grammar


# Custom tools and namespaces ------------------------------------------------------------------------------------


@in_loop
async def test_a_custom_tool_gets_text_and_its_result_is_a_result() -> None:
    call = '<tool_call>{"name": "patch", "arguments": {"input": "a\\n\\"b\\" \\u00e9\\ud83d\\ude00"}}</tool_call>'
    async with answering(call, call, "Done.") as f:
        found = await events(f, tools=[PATCH])
        assert joined(found, "custom_tool_call_input") == 'a\n"b" é😀'
        assert kinds(found)[3:6] == ["custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
        (item,) = (await respond(f, tools=[PATCH]))["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", 'a\n"b" é😀')
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
        await respond(f, [user("hi"), item, result], tools=[PATCH])
        assert '"arguments": {"input": "a\\n\\"b\\" ' in prompt_of(f)


@in_loop
async def test_a_regex_of_a_custom_tool_is_enforced_and_a_wrong_one_refused() -> None:
    shape = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    async with answering(CALL) as f:
        await respond(f, tools=[{**PATCH, "format": shape}], tool_choice="required")
        assert "[a-z]+" in grammar_of(f)
        client = await send(f, tools=[{**PATCH, "format": {**shape, "definition": "[a-z"}}], tool_choice="required")
        assert (client.status, client.json["error"]["param"]) == (400, "tools[0].format.definition")


@in_loop
async def test_a_lark_grammar_of_a_custom_tool_is_enforced_and_a_wrong_one_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(text_jobs, "_loose_tools", LogOnce(text_jobs.log))
    shape = {"type": "grammar", "syntax": "lark", "definition": 'start: "say " /[^"]+/'}
    async with answering(CALL) as f:
        await respond(f, tools=[{**PATCH, "format": shape}], tool_choice="required")
        assert "%lark" in grammar_of(f)
        assert "The input follows this lark grammar" in prompt_of(f)
        client = await send(f, tools=[{**PATCH, "format": {**shape, "definition": "start: other"}}])
        assert (client.status, client.json["error"]["param"]) == (400, "tools[0].format.definition")
        await respond(
            f, tools=[{**PATCH, "format": {**shape, "definition": r"start: /\p{L}+/"}}], tool_choice="required"
        )
        assert "%lark" not in grammar_of(f)
        assert "calls of the tool patch may have any arguments" in caplog.text


@in_loop
async def test_tools_of_a_namespace_are_called_with_its_name() -> None:
    space = {"type": "namespace", "name": "maps", "description": "Maps.", "tools": [WEATHER, PATCH]}
    call = CALL.replace("weather", "maps__weather")
    async with answering(call, "Done.") as f:
        found = await respond(f, tools=[space])
        (item,) = found["output"]
        assert (item["name"], item["namespace"]) == ("weather", "maps")
        assert found["tools"] == [space]
        result = {
            "type": "function_call_output",
            "call_id": item["call_id"],
            "output": [{"type": "input_text", "text": "sun"}],
        }
        await respond(f, [user("hi"), item, result], tools=[space])
        assert '<tool_call>{"name": "maps__weather"' in prompt_of(f)


@in_loop
async def test_hosted_tools_are_left_out_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with answering("Hello.") as f:
        found = await respond(f, tools=[{"type": "web_search_preview_2025_03_11"}, WEATHER])
        assert [tool["type"] for tool in found["tools"]] == ["function"]
        assert "web_search" not in prompt_of(f)
        assert "web_search_preview_2025_03_11, which this server does not run" in caplog.text


# Text, reasoning, log-probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@in_loop
async def test_a_format_is_enforced_and_repeated(kind: str) -> None:
    shape: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        shape |= {
            "name": "sum",
            "schema": {"type": "object", "properties": {"total": {"type": "integer"}}},
            "strict": True,
        }
    async with answering('{"total": 4}') as f:
        found = await respond(f, text={"format": shape, "verbosity": "low"})
        assert found["text"]["verbosity"] == "low"
        assert found["text"]["format"]["type"] == kind
        assert requests(f)[-1].constraint is not None
        client = await send(f, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}})
        assert (client.status, client.json["error"]["param"]) == (400, "text.format.schema.type")


@in_loop
async def test_reasoning_stands_in_the_summary_where_one_is_asked_for() -> None:
    async with answering("2+2</think>4") as f:
        found = await events(f, reasoning={"effort": "low", "summary": "auto"})
        part = ["reasoning_summary_part.added", "reasoning_summary_text.delta"]
        assert kinds(found)[3:5] == part
        response = found[-1]["response"]
        assert response["reasoning"] == {"effort": "low", "summary": "auto"}
        assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "2+2"}]
        assert "content" not in response["output"][0]


@in_loop
async def test_encrypted_reasoning_alone_gives_the_reasoning_back() -> None:
    template = "{% for m in messages %}{{ m.role ~ ':' ~ (m.reasoning_content or '') ~ ';' }}{% endfor %}"
    text = bytes_text(context=10_000, added=("<think>", "</think>"), chat_template=template)
    async with front(Answers(text, "Hello."), text=text) as f:
        item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "treadle.reasoning.Misy"}
        await respond(f, [user("hi"), item, {"role": "assistant", "content": "4"}])
        assert "assistant:2+2;" in prompt_of(f, model=text)
        foreign = {**item, "encrypted_content": "gAAAA"}
        await respond(f, [user("hi"), foreign, {"role": "assistant", "content": "4"}])
        assert "assistant:;" in prompt_of(f, model=text)


@in_loop
async def test_reasoning_is_encrypted_where_it_is_included() -> None:
    async with answering("<think>2+2</think>4") as f:
        (reasoning, _) = (await respond(f, include=["reasoning.encrypted_content"]))["output"]
        assert reasoning["encrypted_content"] == "treadle.reasoning.Misy"
        assert "encrypted_content" not in (await respond(f))["output"][0]


@in_loop
async def test_log_probabilities_stand_with_the_text_of_their_tokens() -> None:
    async with answering("<think>x</think>abc", steps=(2,)) as f:
        found = await events(f, include=["message.output_text.logprobs"], top_logprobs=2)
        deltas = [event for event in found if event["type"] == "response.output_text.delta"]
        for event in deltas:
            assert "".join(token["token"] for token in event["logprobs"]) == event["delta"]
            assert all(len(token["top_logprobs"]) == 2 for token in event["logprobs"])
        content = found[-1]["response"]["output"][1]["content"][0]
        assert [token["token"] for token in content["logprobs"]] == ["a", "b", "c"]


# Clients --------------------------------------------------------------------------------------------------------


@in_loop
async def test_codex_request_is_answered() -> None:
    call = CALL.replace("weather", "multi_agent_v1__close_agent")
    async with answering(f"<think>Now.</think>Wait.\n{call}") as f:
        client = await f.post("/v1/responses", {**CODEX, "model": "m"})
        assert client.status == 200, client.body
        response = client.events[-1]["response"]
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
        assert response["output"][0]["summary"]
        assert response["output"][2]["namespace"] == "multi_agent_v1"
        assert response["store"] is False
        prompt = prompt_of(f)
        assert "multi_agent_v1__wait_agent" in prompt
        assert prompt.count("<|im_start|>user") == 2


@in_loop
async def test_the_official_sdk_streams_parses_and_raises() -> None:
    image: Any = [user([{"type": "input_image", "image_url": "data:image/png;base64,eA=="}])]
    async with (
        answering("Hello.") as f,
        on_port(f.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        async with client.responses.stream(model="m", input="hi", max_output_tokens=50) as stream:
            assert [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert (await stream.get_final_response()).output_text == "Hello."
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].content\[0\].image_url is an image"):
            await client.responses.create(model="m", input=image)


@in_loop
async def test_a_request_that_is_cancelled_by_its_id_is_a_cancelled_response() -> None:
    async with answering("x" * 400, pump=False) as f:
        client = post(PATH, {"model": "m", "input": "hi", "stream": True}).start(f.app)
        await f.step(4)
        found = client.events[0]["response"]["id"]
        assert (await f.post(f"/v1/requests/{found}/cancel", {})).status == 200
        await f.step(4)
        response = client.events[-1]["response"]
        assert (client.events[-1]["type"], response["status"]) == ("response.incomplete", "cancelled")
        assert (await f.get(f"{PATH}/{found}")).json == response
        assert f.idle()


@in_loop
async def test_a_service_tier_is_a_priority_and_named_in_the_answer() -> None:
    async with answering("Hello.") as f:
        assert (await respond(f))["service_tier"] == "default"
        assert (await respond(f, service_tier="flex"))["service_tier"] == "flex"
        assert requests(f)[-1].priority == 1
