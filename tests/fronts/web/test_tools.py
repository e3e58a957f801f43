"""Tools and reasoning in chats: scripted tokens in, OpenAI's format out."""

from __future__ import annotations

import functools
import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fronts.web.server import Front, front, on_port
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.bytes_text import bytes_text
from treadle.text import TextModel

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' ~ ('<think>' if enable_thinking) }}{% endif %}"
)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CLOCK = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "clock"}}]
HI = [{"role": "user", "content": "hi"}]
ODD_ARGUMENTS = [
    ('{"a": "\\ud800 \\ud83d\\ude00"}', '{"a": "\\ufffd \\ud83d\\ude00"}'),
    ('{"a": ' + "9" * 4400 + "}", None),
    ('{"a": ' + "[" * 3000 + "]" * 3000 + "}", None),
    ('{"a": 1e999}', None),
    ('{\n"a": "\\n",\r\n"b": 1}', '{ "a": "\\n",  "b": 1}'),
]
"""Arguments that are valid JSON, and their JSON within an answer where that differs."""


@functools.cache
def text(special: tuple[str, ...] = ()) -> TextModel:
    added = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    return bytes_text(context=100_000, added=added, special=special, chat_template=TEMPLATE)


def answering(*queue: str, steps: tuple[int, ...] = (1,)) -> Any:
    return front(Answers(text(), *queue, steps=steps), text=text())


async def message(f: Front, **fields: Any) -> dict[str, Any]:
    """The first choice of a whole answer, which the official SDK's types take."""
    client = await f.chat(**{"max_tokens": 500, **fields})
    assert client.status == 200, client.body
    ChatCompletion.model_validate(client.json, strict=True)
    found: dict[str, Any] = client.json["choices"][0]
    return found


async def deltas(f: Front, **fields: Any) -> tuple[list[dict[str, Any]], str]:
    """The deltas of a stream, which the official SDK's types take, and the finish reason."""
    client = await f.chat(**{"max_tokens": 500, "stream": True, **fields})
    assert client.status == 200, client.body
    assert client.events[-1] == "[DONE]"
    for event in client.events[:-1]:
        ChatCompletionChunk.model_validate(event, strict=True)
    choices = [event["choices"][0] for event in client.events[:-1]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1
    return [choice["delta"] for choice in choices], reasons[0]


# Whole answers --------------------------------------------------------------------------------------------------


@in_loop
async def test_a_call_is_a_tool_call_without_content() -> None:
    async with answering(CALL) as f:
        choice = await message(f, tools=TOOLS)
        (call,) = choice["message"].pop("tool_calls")
        assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
        assert choice["finish_reason"] == "tool_calls"
        assert call.pop("id").startswith("call_")
        assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        assert f.idle()


@in_loop
async def test_text_and_several_calls_are_one_message_with_ids_of_their_own() -> None:
    async with answering(f"Let me look.\n{CALL}\n{CLOCK}") as f:
        found = (await message(f, tools=TOOLS))["message"]
        assert found["content"] == "Let me look."
        assert [call["function"]["name"] for call in found["tool_calls"]] == ["weather", "clock"]
        assert found["tool_calls"][0]["id"] != found["tool_calls"][1]["id"]


@in_loop
async def test_an_answer_without_a_call_is_text_and_ends_with_stop() -> None:
    async with answering("Hello.") as f:
        choice = await message(f, tools=TOOLS)
        assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
        assert choice["finish_reason"] == "stop"


@in_loop
async def test_a_call_that_the_limit_cuts_ends_with_length() -> None:
    async with answering(CALL) as f:
        choice = await message(f, tools=TOOLS, max_tokens=45)
        assert choice["finish_reason"] == "length"
        assert '{"city": "Rome"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@in_loop
async def test_a_limit_that_cuts_a_call_before_its_name_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with answering(f"{CLOCK}{CALL}") as f:
        choice = await message(f, tools=TOOLS, max_tokens=44)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", '<tool_call>{"name"')
        assert "--tool-parser" not in caplog.text


@in_loop
async def test_a_forced_call_that_the_limit_cuts_before_its_name_is_no_content() -> None:
    async with answering(CALL, f"{CLOCK}{CALL}", CALL) as f:
        choice = await message(f, tools=TOOLS, tool_choice="required", max_tokens=9)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        choice = await message(f, tools=TOOLS, tool_choice="required", max_tokens=44)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"]
        streamed, reason = await deltas(f, tools=TOOLS, tool_choice="required", max_tokens=9)
        assert (reason, {delta.get("content") for delta in streamed}) == ("length", {None})


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_call_that_is_none_becomes_text_and_a_line_in_the_log(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering('Well: <tool_call>{"name": 5}</tool_call>.') as f:
        if stream:
            found, reason = await deltas(f, tools=TOOLS)
            content = "".join(delta.get("content") or "" for delta in found)
        else:
            choice = await message(f, tools=TOOLS)
            content, reason = choice["message"]["content"], choice["finish_reason"]
        assert content == 'Well: <tool_call>{"name": 5}</tool_call>.'
        assert reason == "stop"
        assert "--tool-parser" in caplog.text


@in_loop
async def test_without_tools_nothing_is_read_as_a_call() -> None:
    async with answering(CALL) as f:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = await message(f, **fields)
            assert choice["message"]["content"] == CALL
            assert choice["finish_reason"] == "stop"


# Streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(1,), (7,), (3, 11), (1000,)])
@in_loop
async def test_a_stream_begins_each_call_with_its_name_and_goes_on_with_its_arguments(steps: tuple[int, ...]) -> None:
    async with answering(f"Let me look.\n{CALL}\n{CLOCK}", steps=steps) as f:
        found, reason = await deltas(f, tools=TOOLS)
        assert found[0] == {"role": "assistant", "content": None}
        assert "".join(delta.get("content") or "" for delta in found) == "Let me look."
        pieces = [delta["tool_calls"] for delta in found if "tool_calls" in delta]
        assert all(len(piece) == 1 for piece in pieces)
        for index, name, arguments in ((0, "weather", '{"city": "Rome"}'), (1, "clock", "{}")):
            first, *rest = [piece[0] for piece in pieces if piece[0]["index"] == index]
            assert first.pop("id").startswith("call_")
            assert first == {"index": index, "type": "function", "function": {"name": name, "arguments": ""}}
            assert all(set(piece) == {"index", "function"} for piece in rest)
            assert "".join(piece["function"]["arguments"] for piece in rest) == arguments
        assert reason == "tool_calls"


@in_loop
async def test_arguments_stream_as_they_are_generated() -> None:
    async with answering(CALL) as f:
        found, _ = await deltas(f, tools=TOOLS)
        pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in found if "tool_calls" in delta]
        assert len(pieces) > 10


@in_loop
async def test_choices_have_calls_of_their_own() -> None:
    async with front(Answers(text(), CALL, "Hello."), text=text()) as f:
        client = await f.chat(tools=TOOLS, n=2, stream=True, max_tokens=100)
        last = {c["index"]: c["finish_reason"] for e in client.events[:-1] for c in e["choices"] if c["finish_reason"]}
        assert last == {0: "tool_calls", 1: "stop"}


@in_loop
async def test_a_stop_string_ends_the_text_and_not_a_call() -> None:
    async with answering(CALL, "One. Rome. Two.") as f:
        assert (await message(f, tools=TOOLS, stop="Rome"))["finish_reason"] == "tool_calls"
        choice = await message(f, tools=TOOLS, stop="Rome")
        assert (choice["message"]["content"], choice["finish_reason"]) == ("One. ", "stop")


@in_loop
async def test_a_call_that_a_stop_token_cuts_does_not_end_with_tool_calls() -> None:
    asked = {"tools": TOOLS, "stop_token_ids": [ord("R")], "max_tokens": 100}
    async with answering(CLOCK + CALL, CLOCK + CALL) as f:
        choice = await message(f, **asked)
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert (names, choice["finish_reason"]) == (["clock", "weather"], "stop")
        assert (await deltas(f, **asked))[1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_log_probabilities_and_token_ids_come_with_calls(stream: bool) -> None:
    async with answering(f"Hi. {CALL}") as f:
        client = await f.chat(tools=TOOLS, logprobs=True, return_token_ids=True, stream=stream, max_tokens=200)
        choices = [e["choices"][0] for e in client.events[:-1]] if stream else client.json["choices"]
        shown = [entry["token"] for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert "".join(shown) == "Hi."
        ids = [token for c in choices for token in c.get("token_ids", [])]
        assert text().decode(ids, skip_special_tokens=False) == f"Hi. {CALL}"


# The older form -------------------------------------------------------------------------------------------------


@in_loop
async def test_functions_are_answered_in_their_form() -> None:
    functions = [tool["function"] for tool in TOOLS]
    async with answering(CALL) as f:
        choice = await message(f, functions=functions)
        assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "function_call"
        found, reason = await deltas(f, functions=functions)
        pieces = [delta["function_call"] for delta in found if "function_call" in delta]
        assert pieces[0] == {"name": "weather", "arguments": ""}
        assert "".join(piece["arguments"] for piece in pieces) == '{"city": "Rome"}'
        assert reason == "function_call"


# What the engine and the template get ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "forced"),
    [
        ({}, None),
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"regex": "a+"}}, True),
    ],
    ids=str,
)
@in_loop
async def test_the_engine_gets_the_constraint(fields: dict[str, Any], forced: bool | None) -> None:
    async with answering(CALL) as f:
        await message(f, **fields)
        constraint = f.runner.seen[-1].constraint
        assert (None if constraint is None else not constraint.triggers) == forced


@in_loop
async def test_completions_take_a_format() -> None:
    async with answering("aa") as f:
        client = await f.complete(structured_outputs={"regex": "a+"}, close_at_limit=True)
        assert client.status == 200, client.body
        constraint = f.runner.seen[-1].constraint
        assert constraint is not None
        assert (constraint.kind, constraint.close_at_limit) == ("regex", True)
        assert client.json["choices"][0]["text"] == "aa"


@in_loop
async def test_a_format_of_completions_begins_behind_reasoning_that_their_prompts_leave_open() -> None:
    async with answering("aa") as f:
        await f.complete(prompt=["Hi <think>\n", "Hi"], structured_outputs={"regex": "a+"})
        opened, answers = (request.thinking for request in f.runner.seen[-2:])
        assert opened is not None
        assert opened.opened
        assert answers is None


@in_loop
async def test_a_chat_that_continues_reasoning_is_read_as_reasoning() -> None:
    started = {"role": "assistant", "content": "<think>Two and"}
    async with answering(" two.</think>Four.") as f:
        found = (await message(f, messages=[*HI, started], continue_final_message=True))["message"]
        assert (found["reasoning_content"], found["content"]) == ("two.", "Four.")


@in_loop
async def test_an_answer_and_its_results_go_back_as_they_came() -> None:
    async with answering(CALL, "It is sunny.") as f:
        first = (await message(f, tools=TOOLS))["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "sunny"}
        second = await message(f, tools=TOOLS, messages=[*HI, first, result])
        assert second["message"]["content"] == "It is sunny."
        prompt = text().decode(f.runner.seen[-1].prompt, skip_special_tokens=False)
        assert prompt.startswith("<tools>")
        turns = prompt.partition("<|im_start|>")[2]
        call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        assert turns.endswith(
            f"assistant\n{call}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
        )


@in_loop
async def test_a_call_with_half_a_surrogate_pair_goes_back_too() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>'
    async with answering(call, "It is sunny.") as f:
        first = (await message(f, tools=TOOLS))["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "sunny"}
        second = await message(f, tools=TOOLS, messages=[*HI, first, result])
        assert second["message"]["content"] == "It is sunny."
        assert '{"city": "\ufffd"}' in text().decode(f.runner.seen[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("older", [False, True])
@in_loop
async def test_a_large_body_that_a_worker_parses_has_its_tools_too(older: bool) -> None:
    given = {"functions": [tool["function"] for tool in TOOLS]} if older else {"tools": TOOLS}
    async with answering(CALL) as f:
        messages = [{"role": "user", "content": "x" * 70_000}]
        choice = await message(f, messages=messages, **given)
        assert choice["finish_reason"] == ("function_call" if older else "tool_calls")
        assert f.texts.pool.runs == 2


# Reasoning ------------------------------------------------------------------------------------------------------


@in_loop
async def test_reasoning_is_apart_from_the_content_and_counted() -> None:
    async with answering("<think>\nTwo and two.\n</think>\n\nFour.") as f:
        client = await f.chat(max_tokens=100)
        found = client.json["choices"][0]["message"]
        assert (found["reasoning_content"], found["content"]) == ("Two and two.", "Four.")
        counted = client.json["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 10 < counted < client.json["usage"]["completion_tokens"] - 4
        streamed, reason = await deltas(f)
        assert "".join(delta.get("reasoning_content", "") for delta in streamed) == "Two and two."
        assert "".join(delta.get("content") or "" for delta in streamed) == "Four."
        assert reason == "stop"


@in_loop
async def test_reasoning_that_the_prompt_opened_is_apart_too() -> None:
    async with answering("Two and two.</think>Four.") as f:
        found = (await message(f, enable_thinking=True))["message"]
        assert (found["reasoning_content"], found["content"]) == ("Two and two.", "Four.")


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}], ids=str)
@in_loop
async def test_reasoning_can_be_left_out(fields: dict[str, Any]) -> None:
    async with answering("<think>Two and two.</think>Four.") as f:
        found = (await message(f, **fields))["message"]
        assert found == {"role": "assistant", "content": "Four.", "refusal": None}
        streamed, _ = await deltas(f, **fields)
        assert not any("reasoning_content" in delta for delta in streamed)


@in_loop
async def test_a_budget_reaches_the_engine() -> None:
    async with answering("Hm.</think>Four.") as f:
        await message(f, thinking={"type": "enabled", "budget_tokens": 7})
        thinking = f.runner.seen[-1].thinking
        assert thinking is not None
        assert (thinking.budget, thinking.opened) == (7, True)
        await message(f, enable_thinking=True)
        assert f.runner.seen[-1].thinking is None


# Bad input ------------------------------------------------------------------------------------------------------

BOMB: dict[str, Any] = {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 40} for i in range(40)}}
BOMB["$defs"]["d40"] = {"type": "string"}
BOMB["$ref"] = "#/$defs/d0"
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
SCHEMA = "response_format.json_schema.schema"


def with_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def strict(schema: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema, "strict": True}
    return {"tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (with_schema({"$ref": "https://example.org/schema.json"}), f"{SCHEMA}.$ref"),
        (with_schema(DEEP), SCHEMA),
        (with_schema({"type": "string", "pattern": "(a{1,900}){1,900}"}), f"{SCHEMA}.pattern"),
        (with_schema({"type": "array", "uniqueItems": True}), f"{SCHEMA}.uniqueItems"),
        (with_schema({"type": "strong"}), f"{SCHEMA}.type"),
        (strict({"type": "object", "properties": {"x": {"$ref": "http://x/y"}}}), "tools[0].function.parameters"),
        ({"structured_outputs": {"regex": "(" * 1000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: " + '"a" ' * 250_000}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_regex": "x" * 1_000_000}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs.tools"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("large", [False, True])
@in_loop
async def test_bad_input_is_a_400_with_its_place(fields: dict[str, Any], place: str, large: bool) -> None:
    async with answering("x") as f:
        messages = [{"role": "user", "content": "x" * 70_000 if large else "hi"}]
        client = await f.chat(messages=messages, **fields)
        assert client.status == 400, client.body
        assert str(client.json["error"]["param"]).startswith(place), client.json
        assert len(client.json["error"]["message"]) < 600
        assert f.idle()


@in_loop
async def test_a_schema_bomb_is_answered_or_refused_by_its_place() -> None:
    async with answering("x") as f:
        client = await f.chat(**with_schema(BOMB))
        assert client.status in (200, 400)
        if client.status == 400:
            assert str(client.json["error"]["param"]).startswith(SCHEMA)


# The official SDK -----------------------------------------------------------------------------------------------


class weather(pydantic.BaseModel):  # noqa: N801 (the name of the function)
    """The weather in a city."""

    city: str


class Place(pydantic.BaseModel):
    city: str
    people: int


@in_loop
async def test_the_official_sdk_parses_calls_streams_and_formats() -> None:
    place = '{"city": "Rome", "people": 3}'
    tools = [openai.pydantic_function_tool(weather)]
    async with (
        front(Answers(text(), CALL, CALL, place, place), text=text()) as f,
        on_port(f.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        common: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 200}
        parsed = await client.chat.completions.parse(**common, tools=tools)
        (call,) = parsed.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == weather(city="Rome")

        async with client.chat.completions.stream(**common, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        assert kinds.count("tool_calls.function.arguments.done") == 1
        (call,) = final.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == weather(city="Rome")
        assert final.choices[0].finish_reason == "tool_calls"

        said = await client.chat.completions.parse(**common, response_format=Place)
        assert said.choices[0].message.parsed == Place(city="Rome", people=3)
        async with client.chat.completions.stream(**common, response_format=Place) as answer:
            whole = await answer.get_final_completion()
        assert whole.choices[0].message.parsed == Place(city="Rome", people=3)
        assert json.loads(f.runner.seen[-1].constraint.grammar)  # type: ignore[union-attr]
