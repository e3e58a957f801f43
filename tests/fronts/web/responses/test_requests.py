"""Requests for responses: refusals by name, items as turns, truncation, summaries, and custom inputs."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from tests.fronts.web.responses.calls import (
    CALL,
    PATH,
    WEATHER,
    answering,
    events,
    output_text,
    prompt_of,
    requests,
    respond,
    send,
    user,
)
from tests.fronts.web.server import front
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.bytes_text import bytes_text
from treadle.fronts.web.responses.custom_input import CustomInput
from treadle.fronts.web.responses.items import read_input
from treadle.fronts.web.responses.opaque import REASONING, SUMMARY, unwrap, wrap
from treadle.fronts.web.responses.turns import turns_of

IMAGE = [{"type": "input_image", "image_url": "data:x"}]
FORCED = {"type": "web_search"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "file_search"}]}
CUSTOM = {"type": "custom", "name": "p"}


@in_loop
async def test_an_answer_goes_on_as_long_as_asked() -> None:
    for padding in ({}, {"prompt_cache_key": "x" * 70_000}):  # parsed on the event loop, and in a text worker
        async with front() as f:
            body = {"model": "m", "input": "hi", "max_output_tokens": 40, **padding}
            usual, ignoring, longer = [
                await f.post(PATH, body | more) for more in ({}, {"ignore_eos": True}, {"min_tokens": 20})
            ]
            counts = [client.json["usage"]["output_tokens"] for client in (usual, ignoring, longer)]
            assert (counts[0], counts[1], counts[2] > 19) == (12, 40, True)
            assert f.runner.seen[-1].min_tokens == 20


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": "1"}, "min_tokens", "a whole number"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"input": None}, "input", "give a text"),
        ({"input": []}, "input", "empty"),
        ({"input": 3}, "input", "a number"),
        ({"input": [3]}, "input[0]", "an object with a type"),
        ({"input": [{}]}, "input[0].type", "null"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "'computer_call' is not supported"),
        ({"input": [user("a"), {"role": "critic", "content": "a"}]}, "input[1].role", "'critic'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [user([])]}, "input[0].content", "empty"),
        ({"input": [user(IMAGE)]}, "input[0].content[0].image_url", "no data URL in base64"),
        ({"input": [user([{"type": "input_image"}])]}, "input[0].content[0].image_url", "missing"),
        ({"input": [user([{"type": "input_image", "file_id": "f"}])]}, "input[0].content[0].file_id", "not supported"),
        ({"input": [{"role": "system", "content": IMAGE}]}, "input[0].content[0].type", "message of the system"),
        ({"input": [{"role": "assistant", "content": IMAGE}]}, "input[0].content[0].type", "message of the assistant"),
        ({"input": [user([{"type": "input_audio"}])]}, "input[0].content[0].type", "'input_audio' is not supported"),
        ({"input": [user([{"type": "input_text"}])]}, "input[0].content[0].text", "missing"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", "missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "missing"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": IMAGE}]},
            "input[0].output[0].image_url",
            "no data URL in base64",
        ),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content", "this server"),
        ({"input": [{"type": "compaction_trigger"}, user("a")]}, "input[0]", "last item"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"service_tier": "gold"}, "service_tier", "not supported"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not supported"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"max_tool_calls": 0}, "max_tool_calls", "from 1"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"temperature": 3}, "temperature", "temperature is 3"),
        ({"truncation": "middle"}, "truncation", "auto, disabled"),
        ({"include": ["everything"]}, "include[0]", "'everything'"),
        ({"include": "all"}, "include", "array"),
        ({"metadata": {"a": 1}}, "metadata", "texts"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "17 keys"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "too long"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "'loud'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is missing"),
        ({"text": "a"}, "text", "object"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'huge'"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "'long'"),
        ({"background": True, "store": False}, "background", "store"),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type", "'teleport'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "letters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "earlier"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "gbnf"}}]}, "tools[0].format.syntax", "lark"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [FORCED]}]}, "tools[0].tools[0]", "'function'"),
        ({"tools": [FORCED], "tool_choice": "required"}, "tool_choice", "web_search, which this server does not run"),
        ({"tools": [WEATHER], "tool_choice": FORCED}, "tool_choice.type", "'web_search'"),
        ({"tools": [WEATHER], "tool_choice": ALLOWED}, "tool_choice.tools", "no function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice.name", "weather"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "'always'"),
    ],
)
@in_loop
async def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str, says: str) -> None:
    async with answering("Hello.") as f:
        for padding in ({}, {"prompt_cache_key": "x" * 70_000}):  # parsed here, and in a text worker
            client = await f.post(PATH, {"model": "m", "input": "hi", **fields, **padding})
            assert client.status == 400, client.body
            error = client.json["error"]
            assert (error["param"], says in error["message"]) == (param, True), error
        assert f.idle()


@in_loop
async def test_a_missing_model_is_the_served_one_and_an_unknown_one_is_refused() -> None:
    async with answering("Hello.") as f:
        client = await f.post(PATH, {"input": "hi"})
        assert (client.status, client.json["model"]) == (200, "m")
        client = await f.post(PATH, {"model": "other", "input": "hi"})
        assert (client.status, client.json["error"]["code"]) == (404, "model_not_found")


@in_loop
async def test_fields_that_clients_always_send_change_nothing() -> None:
    always = {
        "client_metadata": {"a": "b"},
        "prompt_cache_retention": "24h",
        "service_tier": "auto",
        "safety_identifier": "s",
        "max_tool_calls": 3,
        "conversation": None,
    }
    async with answering("Hello.") as f:
        plain, found = await respond(f), await respond(f, **always)
        assert output_text(plain) == output_text(found)
        assert (found["max_tool_calls"], found["safety_identifier"]) == (3, "s")
        assert prompt_of(f, 0) == prompt_of(f, 1)


# Items as turns -------------------------------------------------------------------------------------------------


def test_consecutive_items_of_the_assistant_are_one_turn() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": {"x": 1}},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "namespace": "n", "input": "text"},
        {"type": "function_call_output", "call_id": "c1", "output": ""},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"role": "assistant", "content": "A", "phase": "commentary"},
        {"role": "assistant", "content": "B"},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "n__g", "arguments": '{"input": "text"}'}},
    ]
    assert turns_of(read_input(items)) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "reasoning_content": "hm", "content": "No.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "tool", "tool_call_id": "c2", "content": "r"},
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": "B"},
    ]


def test_calls_of_tools_that_openai_models_know_are_calls() -> None:
    items = [
        {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "files"},
        {"type": "apply_patch_call", "call_id": "d", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "d", "status": "completed", "output": "ok"},
    ]
    first, result, second, _ = turns_of(read_input(items))
    assert first["tool_calls"][0]["function"]["name"] == "local_shell"
    assert json.loads(second["tool_calls"][0]["function"]["arguments"])["path"] == "a"
    assert result == {"role": "tool", "tool_call_id": "c", "content": "files"}


# Truncation -----------------------------------------------------------------------------------------------------


@in_loop
async def test_the_oldest_turns_are_left_out_where_that_is_allowed() -> None:
    model = bytes_text(context=2000)
    async with front(Answers(model, "Hello."), text=model) as f:
        turns = [user(f"{i:03}" + "x" * 200) for i in range(20)]
        given = [{"role": "developer", "content": "Keep me."}, *turns]
        refused = await send(f, given, max_output_tokens=50)
        assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
        assert refused.json["error"]["param"] == "input"
        found = await respond(f, given, max_output_tokens=50, truncation="auto")
        assert found["truncation"] == "auto"
        assert 1700 < found["usage"]["input_tokens"] <= 1950
        prompt = prompt_of(f, model=model)
        assert "Keep me." in prompt
        assert "019x" in prompt
        assert "000x" not in prompt
        await respond(f, given, max_output_tokens=None, truncation="auto")
        left = requests(f)[-1]
        assert len(left.prompt) <= 1500
        whole = await respond(f, given[:4], max_output_tokens=50, truncation="auto")
        assert whole["usage"]["input_tokens"] > 3 * 200
        hopeless = await send(f, [user("x" * 90_000)], truncation="auto")
        assert hopeless.json["error"]["code"] == "context_length_exceeded"


# Summaries ------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_conversation_is_compacted_by_the_model_and_goes_on_from_the_summary() -> None:
    async with answering("<think>hm</think> They agreed. ", "Hello.") as f:
        given = [user("Tuesday?"), {"role": "assistant", "content": "Yes."}]
        client = await f.post(f"{PATH}/compact", {"model": "m", "input": given, "tools": [WEATHER], "store": True})
        assert client.status == 200, client.body
        found = client.json
        assert found["object"] == "response.compaction"
        assert found["usage"]["output_tokens"] > 0
        assert "Summarize this conversation" in prompt_of(f)
        assert '"weather"' in prompt_of(f)
        assert unwrap(SUMMARY, found["output"][0]["encrypted_content"]) == "They agreed."
        await respond(f, [*found["output"], user("And now?")])
        assert prompt_of(f).startswith(
            "<|im_start|>user\nSummary of the conversation so far:\n\nThey agreed.<|im_end|>\n"
            "<|im_start|>user\nAnd now?"
        )


@in_loop
async def test_a_trigger_in_the_input_makes_the_answer_a_summary() -> None:
    async with answering(f"They agreed. {CALL}", "Hello.") as f:
        given = [{"role": "developer", "content": "Rules."}, user("Tuesday?"), {"type": "compaction_trigger"}]
        found = await events(f, given, tools=[WEATHER])
        (item,) = found[-1]["response"]["output"]
        assert item["type"] == "compaction"
        assert "response.output_text.delta" not in [event["type"] for event in found]
        await respond(f, "on", previous_response_id=found[-1]["response"]["id"])
        assert "Rules." in prompt_of(f)
        assert "Tuesday?" not in prompt_of(f)
        assert "They agreed." in prompt_of(f)


@in_loop
async def test_half_a_summary_is_none() -> None:
    async with answering("They agreed.") as f:
        client = await f.post(f"{PATH}/compact", {"model": "m", "input": "hi", "max_output_tokens": 4})
        assert (client.status, client.json["error"]["code"]) == (400, "context_length_exceeded")
        cut = await respond(f, [user("hi"), {"type": "compaction_trigger"}], max_output_tokens=4)
        assert (cut["status"], cut["output"]) == ("incomplete", [])
        client = await f.post(f"{PATH}/compact", {"model": "m", "input": "hi", "stream": True})
        assert (client.status, client.json["error"]["param"]) == (400, "stream")


# Prefixes -------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_agents_session_computes_nothing_twice() -> None:
    """Twenty turns, half of them by previous_response_id and half with all items: each prompt begins with the tokens of
    the last one and of its answer."""
    queue = [f"Step {i}.{CALL}" for i in range(20)]
    async with answering(*queue, prefix_cache=True, cache_tokens=100_000) as f:
        items: list[Any] = [user("go")]
        last: dict[str, Any] | None = None
        shares: list[float] = []
        total = 1
        for turn in range(20):
            by_id = turn % 2 and last is not None
            given = items[-1:] if by_id else items
            last = await respond(
                f, given, tools=[WEATHER], instructions="Be brief.",
                previous_response_id=last["id"] if by_id and last else None,
            )  # fmt: skip
            shares.append(last["usage"]["input_tokens_details"]["cached_tokens"] / total)
            total = last["usage"]["total_tokens"]
            call = last["output"][-1]
            items += [
                *last["output"],
                {"type": "function_call_output", "call_id": call["call_id"], "output": f"r{turn}"},
            ]
        for before, after in itertools.pairwise(requests(f)):
            assert after.prompt[: len(before.prompt)] == before.prompt
        assert min(shares[1:]) >= 0.95  # of all tokens that the last request computed or generated


# Custom inputs --------------------------------------------------------------------------------------------------

DEEP = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"
LONG = '{"a": ' + "9" * 4400 + "}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input":"\\u00e9\\ud83d\\ude00\\\\"}', "é😀\\"),
        ('{"input": ""}', ""),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"a\\udc00": "\\ud83d"}', "\ufffd"),
        ('{"a": "\\ud83d", "b": 1}', '{"a": "\\ud83d", "b": 1}'),
        (DEEP, DEEP),
        (LONG, LONG),
        ('{"input": "cut', "cut"),
        ('{"patch": "other"}', "other"),
        ('{"a": "1", "b": "2"}', '{"a": "1", "b": "2"}'),
        ('"bare"', "bare"),
        ("{", "{"),
    ],
)
def test_a_custom_input_is_read_however_it_is_cut(arguments: str, expected: str) -> None:
    chance = random.Random(7)
    for _ in range(50):
        cuts = sorted(chance.choices(range(len(arguments) + 1), k=3))
        pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
        reader = CustomInput()
        shown = "".join(map(reader.push, pieces)) + reader.finish()
        assert (shown, reader.text) == (expected, expected)


def test_opaque_texts_are_read_back_and_others_are_not() -> None:
    assert unwrap(REASONING, wrap(REASONING, "é")) == "é"
    assert unwrap(SUMMARY, wrap(REASONING, "é")) is None
    assert unwrap(REASONING, "treadle.reasoning.%%") is None
