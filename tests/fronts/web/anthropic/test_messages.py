"""Answers of /v1/messages, whole and streamed, of scripted tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fronts.web.anthropic.scenes import (
    CALL,
    CLOCK,
    HI,
    MARK,
    PATH,
    TOOLS,
    answering,
    assembled,
    events_of,
    message,
    said,
    stream,
    text,
    without_ids,
)
from tests.fronts.web.server import forever, front, says
from tests.fronts.web.test_tools import ODD_ARGUMENTS
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.asgi import post
from treadle.fronts.generation.pieces import Usage
from treadle.fronts.web.anthropic.wire import AnswerLimits, usage_json
from treadle.fronts.web.parsed import Head

THOUGHT = "<think>two and two</think>"
ADAPTIVE = {"type": "adaptive"}


@in_loop
async def test_an_answer_is_one_block_of_text() -> None:
    async with answering("Hello.") as f:
        found = await message(f)
        assert found["content"] == [said("Hello.")]
        assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
        assert f.idle()


@pytest.mark.parametrize("steps", [(1,), (3, 7), (1000,)])
@pytest.mark.parametrize(
    "answer",
    [
        "Hello.",
        CALL,
        f"Let me look.\n{CALL}\n{CLOCK}",
        f"{THOUGHT}Four.",
        f"{THOUGHT}Let me look.{CALL}",
        f"{THOUGHT}{CLOCK}",
        "",
    ],
)
@in_loop
async def test_a_stream_gives_the_message_that_a_whole_answer_has(answer: str, steps: tuple[int, ...]) -> None:
    async with answering(answer, steps=steps) as f:
        fields: dict[str, Any] = {"tools": TOOLS, "thinking": ADAPTIVE}
        whole = await message(f, **fields)
        streamed = assembled(await stream(f, **fields))
        assert without_ids(streamed.pop("content")) == without_ids(whole.pop("content"))
        for key in ("stop_reason", "stop_sequence", "usage", "model"):
            assert streamed[key] == whole[key]


@in_loop
async def test_a_stream_begins_with_the_prompts_usage_and_ends_with_the_whole() -> None:
    async with answering("Hello.") as f:
        events = await stream(f)
        started, ended = events[0]["message"], events[-2]
        assert started["content"] == []
        assert (started["stop_reason"], started["stop_sequence"]) == (None, None)
        assert started["usage"]["input_tokens"] == ended["usage"]["input_tokens"] > 0
        assert (started["usage"]["output_tokens"], ended["usage"]["output_tokens"]) == (0, 7)


# Tools ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_calls_are_blocks_with_ids_of_their_own_behind_the_text() -> None:
    async with answering(f"Let me look.\n{CALL}\n{CLOCK}") as f:
        found = await message(f, tools=TOOLS)
        words, weather, clock = found["content"]
        assert words == said("Let me look.")
        assert weather.pop("id").startswith("toolu_")
        assert weather == {
            "type": "tool_use",
            "name": "weather",
            "input": {"city": "Rome"},
            "caller": {"type": "direct"},
        }
        assert clock["input"] == {}
        assert found["stop_reason"] == "tool_use"


@in_loop
async def test_arguments_stream_as_they_are_generated() -> None:
    async with answering(CALL) as f:
        deltas = [e["delta"] for e in await stream(f, tools=TOOLS) if e["type"] == "content_block_delta"]
        assert {delta["type"] for delta in deltas} == {"input_json_delta"}
        assert len(deltas) > 10


@pytest.mark.parametrize(("arguments", "sent"), ODD_ARGUMENTS, ids=lambda given: str(given)[:20])
@in_loop
async def test_arguments_are_sent_as_the_model_wrote_them(arguments: str, sent: str | None) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    async with answering(call, steps=(100,)) as f:
        client = await f.post(PATH, {"model": "m", "messages": HI, "tools": TOOLS, "max_tokens": 9000})
    assert client.status == 200
    assert f'"name":"weather","input":{sent or arguments},'.encode() in client.body


@pytest.mark.parametrize("most", [45, 48])
@in_loop
async def test_a_call_that_the_limit_cuts_has_no_arguments_and_says_why(most: int) -> None:
    async with answering(CALL) as f:
        found = await message(f, tools=TOOLS, max_tokens=most)
        assert found["stop_reason"] == "max_tokens"
        assert found["content"][0]["input"] == {}


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_an_answer_that_ends_within_a_call_does_not_end_with_tool_use(streamed: bool) -> None:
    async with answering(CALL[:-30]) as f:
        found = (await stream(f, tools=TOOLS))[-2]["delta"] if streamed else await message(f, tools=TOOLS)
        assert found["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("choice", "forced", "answer"),
    [
        (None, False, "Hello."),
        ({"type": "auto"}, False, "Hello."),
        ({"type": "any"}, True, CALL),
        ({"type": "any", "disable_parallel_tool_use": True}, True, CALL),
        ({"type": "tool", "name": "clock"}, True, CLOCK),
    ],
)
@in_loop
async def test_the_choice_reaches_the_engine(choice: Any, forced: bool, answer: str) -> None:
    answers = Answers(text(), answer)
    async with front(answers, text=text()) as f:
        await message(f, tools=TOOLS, tool_choice=choice)
        constraint = answers.requests[0].constraint
        assert constraint is not None
        assert (constraint.triggers == ()) is forced


@in_loop
async def test_tools_that_may_not_be_called_are_not_in_the_prompt() -> None:
    answers = Answers(text(), CALL)
    async with front(answers, text=text()) as f:
        found = await message(f, tools=TOOLS, tool_choice={"type": "none"})
        assert found["content"] == [said(CALL)]
        assert b"<tools>" not in bytes(t for t in answers.requests[0].prompt if t < 256)


# Thinking -------------------------------------------------------------------------------------------------------


@in_loop
async def test_thinking_is_a_block_with_a_signature_before_the_answer() -> None:
    async with answering(f"{THOUGHT}Four.") as f:
        thought, words = (await message(f, thinking=ADAPTIVE))["content"]
        assert thought.pop("signature").startswith("treadle-digest:")
        assert thought == {"type": "thinking", "thinking": "two and two"}
        assert words == said("Four.")


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
@in_loop
async def test_without_thinking_the_answer_begins_with_its_text(thinking: Any) -> None:
    answers = Answers(text(), f"{THOUGHT}Four.")
    async with front(answers, text=text()) as f:
        found = await message(f, thinking=thinking)
        assert [block["type"] for block in found["content"]] == ["text"]
        assert text().decode(answers.requests[0].prompt, skip_special_tokens=False).endswith("<think></think>")


@pytest.mark.parametrize("thinking", [ADAPTIVE, {"type": "enabled", "budget_tokens": 1024}])
@in_loop
async def test_thinking_reaches_the_template_and_its_budget_the_engine(thinking: Any) -> None:
    answers = Answers(text(), "Four.")
    async with front(answers, text=text()) as f:
        await message(f, thinking=thinking)
        (request,) = answers.requests
        assert not text().decode(request.prompt, skip_special_tokens=False).endswith("<think></think>")
        budget = None if request.thinking is None else request.thinking.budget
        assert budget == thinking.get("budget_tokens")


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_omitted_thinking_comes_back_in_its_signature(streamed: bool) -> None:
    fields: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}}
    answers = Answers(text(), f"{THOUGHT}Four.")
    async with front(answers, text=text()) as f:
        found = assembled(await stream(f, **fields)) if streamed else await message(f, **fields)
        assert found["content"][0]["thinking"] == ""
        turns = [*HI, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": "and?"}]
        await message(f, messages=turns, **fields)
        before, after = (text().decode(request.prompt, skip_special_tokens=False) for request in answers.requests)
        assert after.startswith(f"{before}{THOUGHT}Four.<|im_end|>")


@in_loop
async def test_thinking_tokens_are_counted() -> None:
    async with answering(f"{THOUGHT}Four.") as f:
        usage = (await message(f, thinking=ADAPTIVE))["usage"]
        assert 11 <= usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


# Ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_a_stop_sequence_is_named(streamed: bool) -> None:
    async with answering("One. Two. Three.") as f:
        fields = {"stop_sequences": ["Nine", "Two"]}
        found = assembled(await stream(f, **fields)) if streamed else await message(f, **fields)
        assert found["content"] == [said("One. ")]
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "Two")


@in_loop
async def test_a_special_token_as_a_stop_sequence_is_named_too() -> None:
    async with front(says("One.")) as f:
        special = f.texts.loaded.token_text(f.texts.loaded.eos_token_ids[0])  # type: ignore[union-attr]
        found = await message(f, stop_sequences=[special])
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", special)


@pytest.mark.parametrize(
    ("most", "settings", "tokens", "reason"),
    [
        (5, {}, 5, "max_tokens"),
        (32_000, {"max_tokens": 7}, 7, "max_tokens"),
        (32_000, {}, 43, "model_context_window_exceeded"),
        (2**31 - 1, {}, 43, "model_context_window_exceeded"),
    ],
)
@in_loop
async def test_a_limit_is_cut_to_what_fits_and_the_end_says_which(
    most: int, settings: dict[str, Any], tokens: int, reason: str
) -> None:
    async with front(forever, context=64, **settings) as f:
        found = await message(f, max_tokens=most)
        assert found["usage"]["output_tokens"] == tokens
        assert found["stop_reason"] == reason


@in_loop
async def test_no_tokens_are_generated_where_none_are_asked_for() -> None:
    async with answering("Hello.") as f:
        found = await message(f, max_tokens=0)
        assert (found["content"], found["stop_reason"]) == ([], "max_tokens")
        assert found["usage"]["output_tokens"] == 0


@in_loop
async def test_the_beginning_of_the_answer_is_continued() -> None:
    answers = Answers(text(), "Paris.")
    async with front(answers, text=text()) as f:
        found = await message(f, messages=[*HI, {"role": "assistant", "content": "It is "}])
        assert found["content"] == [said("Paris.")]
        assert text().decode(answers.requests[0].prompt, skip_special_tokens=False).endswith("assistant\nIt is ")


@in_loop
async def test_json_of_a_schema_is_enforced_under_both_names() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "schema": schema}
    answers = Answers(text(), '{"a": 1}')
    async with front(answers, text=text()) as f:
        for fields in ({"output_config": {"format": wanted, "effort": "low"}}, {"output_format": wanted}):
            found = await message(f, **fields)
            assert json.loads(found["content"][0]["text"]) == {"a": 1}
        assert all(request.constraint is not None for request in answers.requests)


# Usage and the cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_cached_tokens_are_apart_and_the_sum_is_the_prompt(streamed: bool) -> None:
    async with front(says("Hello."), prefix_cache=True) as f:
        first, again = [(assembled(await stream(f)) if streamed else await message(f))["usage"] for _ in range(2)]
        whole = first["input_tokens"]
        assert (first["cache_read_input_tokens"], first["cache_creation_input_tokens"]) == (0, 0)
        assert again["cache_read_input_tokens"] == whole - 1
        assert again["input_tokens"] == 1


@in_loop
async def test_where_no_cache_is_nothing_is_written_to_it() -> None:
    async with front(says("Hello.")) as f:
        usage = (await message(f, cache_control=MARK))["usage"]
        assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    ("caches", "keeps", "counts"),
    [(True, True, (0, 6, 4)), (False, True, (6, 0, 4)), (True, False, (6, 0, 4))],
)
def test_tokens_are_written_to_the_cache_where_the_request_marks_some(
    caches: bool, keeps: bool, counts: tuple[int, int, int]
) -> None:
    head = Head("msg_1", 0, "m", "", caches_prompts=keeps)
    found = usage_json(Usage(10, 3, 4, 2), AnswerLimits(5, caches=caches), head)
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert tuple(found[kind] for kind in kinds) == counts
    assert (found["output_tokens"], found["output_tokens_details"]) == (3, {"thinking_tokens": 2})


# Streams that wait or fail --------------------------------------------------------------------------------------


@in_loop
async def test_a_silent_stream_has_pings() -> None:
    async with front(forever, pump=False, keepalive_s=0.01) as f:
        client = post(PATH, {"messages": HI, "max_tokens": 9, "stream": True}).start(f.app)
        await f.step()
        await client.until(lambda c: b"ping" in c.body)
        kinds = [event["type"] for event in events_of(client)]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "ping"
        client.leave()
        await f.step(3)


@in_loop
async def test_a_failure_in_a_stream_is_an_error_event() -> None:
    def failing(request: Any, position: int) -> int:
        if position == 3:
            raise RuntimeError("broken")
        return ord("x")

    async with front(failing) as f:
        client = await f.post(PATH, {"messages": HI, "max_tokens": 9, "stream": True})
        last = events_of(client)[-1]
        assert last["type"] == "error"
        assert last["error"]["type"] == "api_error"
        assert last["request_id"] == client.headers["request-id"]
