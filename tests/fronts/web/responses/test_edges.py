"""Unusual requests for responses: odd items, ends within a call, cancels at every point, limits beyond the context."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from tests.fronts.web.responses.calls import (
    CALL,
    PATH,
    WEATHER,
    answering,
    checked,
    events,
    kinds,
    output_text,
    prompt_of,
    respond,
    send,
    user,
)
from tests.fronts.web.responses.test_stored import call, stream
from tests.fronts.web.server import front, settle
from tests.fronts.web.test_tools import TEMPLATE
from tests.support.aio import in_loop
from tests.support.answers import Answers
from tests.support.asgi import Client, post
from tests.support.bytes_text import bytes_text
from treadle.fronts.web.responses.output import _Message
from treadle.fronts.web.responses.store import ResponseStore
from treadle.fronts.web.responses.writer import ResponseWriter

MAPS = {"type": "namespace", "name": "maps", "description": "Maps.", "tools": [WEATHER]}
SHELL = {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"]}}
SHELL_OUTPUT = [{"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]


HALF = '<tool_call>{"name": "f\\ud800", "id": "\\udc00", "arguments": {"a": "\\ud800"}}</tool_call>'


# Ends -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_half_a_surrogate_pair_in_a_call_is_none() -> None:
    async with answering(HALF) as f:
        found = await events(f, tools=[WEATHER])
        assert found[-1]["type"] == "response.completed"
        (item,) = found[-1]["response"]["output"]
        assert (item["name"], item["call_id"]) == ("f\ufffd", "\ufffd")
        assert (await respond(f, tools=[WEATHER]))["output"][0]["name"] == "f\ufffd"


@in_loop
async def test_a_response_whose_last_item_can_not_be_written_ends_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(item: _Message) -> None:
        raise UnicodeError("half a pair")

    monkeypatch.setattr(_Message, "end", fail)
    monkeypatch.setattr(_Message, "add", lambda item, text: fail(item))
    async with answering("Hello.") as f:
        client = await send(f, stream=True)
        assert kinds(checked(client))[-2:] == ["error", "failed"]
        assert client.events[-1]["response"]["output"] == []
        queued = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        await settle()
        found = (await f.get(f"{PATH}/{queued.json['id']}")).json
        assert (found["status"], found["output"]) == ("failed", [])
        again = await stream(f, Client("GET", f"{PATH}/{queued.json['id']}"), "stream=true")
        assert again.events[-1]["type"] == "response.failed"
    assert "it is left out" in caplog.text


@in_loop
async def test_a_response_that_can_not_be_ended_is_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any) -> None:
        raise UnicodeError("half a pair")

    monkeypatch.setattr(ResponseWriter, "piece", fail)
    monkeypatch.setattr(ResponseWriter, "error", fail)
    async with answering("Hello.") as f:
        queued = await f.post(PATH, {"model": "m", "input": "hi", "background": True})
        await settle()
        assert (await f.get(f"{PATH}/{queued.json['id']}")).status == 404
        assert (await f.get("/v1/status")).json["responses"]["stored"] == 0
        assert f.idle()
    assert "it is removed" in caplog.text


# Input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"input": []}])
@in_loop
async def test_a_response_is_continued_without_new_input(given: dict[str, Any]) -> None:
    async with answering("Hello.", "On.") as f:
        first = await respond(f)
        client = await f.post(PATH, {"model": "m", "previous_response_id": first["id"], **given})
        assert (client.status, output_text(client.json)) == (200, "On.")
        assert prompt_of(f).endswith("assistant\nHello.<|im_end|>\n<|im_start|>assistant\n")


@in_loop
async def test_an_input_may_be_a_reference_alone() -> None:
    async with answering("Hello.") as f:
        listed = await f.get(f"{PATH}/{(await respond(f))['id']}/input_items")
        await respond(f, [{"type": "item_reference", "id": listed.json["data"][0]["id"]}])
        assert "user\nhi<|im_end|>" in prompt_of(f)


@pytest.mark.parametrize("kind", ["web_search_call", "reasoning"])
@in_loop
async def test_an_input_without_anything_for_the_prompt_is_refused(kind: str) -> None:
    async with answering("Hello.") as f:
        client = await send(f, [{"type": kind, "id": "x"}])
        assert (client.status, client.json["error"]["param"]) == (400, "input")
        assert f.idle()


@in_loop
async def test_items_of_a_shell_are_listed_as_they_were_given() -> None:
    output = {"type": "shell_call_output", "call_id": "a", "output": SHELL_OUTPUT}
    async with answering("Hello.") as f:
        found = await respond(f, [SHELL, output, user("on")])
        assert '<|im_start|>tool\n[{"stdout": "x"' in prompt_of(f)
        listed = (await f.get(f"{PATH}/{found['id']}/input_items")).json
        ResponseItemList.model_validate(listed | {"data": listed["data"][:1]})
        assert listed["data"][1]["output"] == SHELL_OUTPUT


@in_loop
async def test_more_tools_of_a_namespace_that_is_there_are_added_once() -> None:
    more = {**MAPS, "tools": [WEATHER, {**WEATHER, "name": "roads"}]}
    items = [{"type": "additional_tools", "tools": [MAPS]}, user("hi"), {"type": "additional_tools", "tools": [more]}]
    async with answering(CALL.replace("weather", "maps__roads")) as f:
        found = await respond(f, items, tools=[MAPS])
        assert [(item["namespace"], item["name"]) for item in found["output"]] == [("maps", "roads")]
        assert prompt_of(f).count('"name": "maps__weather"') == 1
        assert found["tools"] == [MAPS, {**MAPS, "tools": more["tools"][1:]}]


# Choices and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", [3, [1], {}])
@in_loop
async def test_a_choice_with_a_namespace_that_is_no_text_is_refused(namespace: Any) -> None:
    async with answering(CALL) as f:
        choice = {"type": "function", "name": "weather", "namespace": namespace}
        client = await send(f, tools=[WEATHER], tool_choice=choice)
        assert (client.status, client.json["error"]["param"]) == (400, "tool_choice.namespace")


@in_loop
async def test_dated_hosted_tools_are_left_out_of_allowed_ones_and_the_mode_is_repeated() -> None:
    allowed = [{"type": "web_search_preview_2025_03_11"}, {"type": "function", "name": "weather"}]
    async with answering(CALL) as f:
        found = await respond(f, tools=[WEATHER], tool_choice={"type": "allowed_tools", "tools": allowed})
        assert found["tool_choice"] == {"type": "allowed_tools", "mode": "auto", "tools": allowed}


@in_loop
async def test_a_summary_is_asked_for_by_its_older_name_too() -> None:
    async with answering("<think>2+2</think>4") as f:
        found = await respond(f, reasoning={"generate_summary": "auto"})
        assert found["output"][0]["summary"] == [{"type": "summary_text", "text": "2+2"}]
        client = await send(f, reasoning={"generate_summary": "long"})
        assert (client.status, client.json["error"]["param"]) == (400, "reasoning.generate_summary")


@pytest.mark.parametrize("most", [2000, 200_000])
@in_loop
async def test_truncation_leaves_space_where_the_limit_is_more_than_the_context(most: int) -> None:
    text = bytes_text(context=2000, chat_template=TEMPLATE)
    async with front(Answers(text, "Hello."), text=text) as f:
        body = {"model": "m", "truncation": "auto", "max_output_tokens": most}
        long = await f.post(PATH, {**body, "input": [user(str(i) * 300) for i in range(9)]})
        assert (long.status, long.json["usage"]["input_tokens"] <= 1500) == (200, True)
        short = await f.post(PATH, {**body, "input": "hi"})
        assert short.json["status"] == "completed"


# Ends -----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_call_within_which_the_model_ends_its_answer_is_incomplete() -> None:
    async with answering(CALL[:-20]) as f:
        streamed = (await events(f, tools=[WEATHER]))[-1]["response"]
        for found in (streamed, await respond(f, tools=[WEATHER])):
            assert (found["status"], found["output"][0]["status"]) == ("completed", "incomplete")


@pytest.mark.parametrize("steps", [0, 1, 3])
@in_loop
async def test_a_background_response_is_cancelled_at_any_point_and_by_several(steps: int) -> None:
    async with answering("Hello.", pump=False) as f:
        path = f"{PATH}/{(await f.post(PATH, {'model': 'm', 'input': 'hi', 'background': True})).json['id']}"
        await f.step(steps)
        cancels = [asyncio.create_task(call(f, "POST", f"{path}/cancel")) for _ in range(3)]
        reading = asyncio.create_task(stream(f, Client("GET", path), "stream=true"))
        found = [(await cancel).json for cancel in cancels]
        assert found[0] == found[1] == found[2]
        assert (found[0]["status"], found[0]["incomplete_details"]) == ("cancelled", None)
        assert ([] if steps == 0 else ["message"]) == [item["type"] for item in found[0]["output"]]
        assert (found[0]["usage"] is None) == (steps == 0)
        assert kinds(checked(await reading))[-1] == "incomplete"
        Response.model_validate(found[0])
        await f.step(1)
        assert f.idle()


@in_loop
async def test_a_response_that_fails_before_its_first_token_has_no_output() -> None:
    async with answering("Hello.", pump=False) as f:
        path = f"{PATH}/{(await f.post(PATH, {'model': 'm', 'input': 'hi', 'background': True})).json['id']}"
        await f.engine.stop()
        while (found := (await f.get(path)).json)["status"] == "queued":
            await asyncio.sleep(0)
        assert (found["status"], found["output"], found["usage"]) == ("failed", [], None)


@in_loop
async def test_a_background_response_is_streamed_again_from_every_number() -> None:
    async with answering(f"<think>x</think>Look.{CALL}", steps=(3,)) as f:
        body = {"model": "m", "input": "hi", "background": True, "stream": True, "tools": [WEATHER]}
        whole = await f.post(PATH, body)
        path = f"{PATH}/{whole.events[0]['response']['id']}"
        assert len(checked(whole)) > 10
        for number in range(len(whole.events) + 2):
            again = await stream(f, Client("GET", path), f"stream=true&starting_after={number}")
            assert (again.status, again.complete) == (200, True)
            assert again.events == whole.events[number + 1 :]


@in_loop
async def test_a_response_that_is_streamed_is_retrieved_as_it_is() -> None:
    async with answering("<think>x</think>Look.", pump=False) as f:
        client = post(PATH, {"model": "m", "input": "hi", "stream": True}).start(f.app)
        await f.step(8)
        created = client.events[0]["response"]
        found = (await f.get(f"{PATH}/{created['id']}")).json
        assert (found["status"], found["created_at"]) == ("in_progress", created["created_at"])
        assert [item["type"] for item in found["output"]] == ["reasoning"]
        await f.step(20)
        assert (await f.get(f"{PATH}/{created['id']}")).json == client.events[-1]["response"]


# The store ------------------------------------------------------------------------------------------------------


def test_an_item_that_two_responses_were_given_outlives_each_of_them() -> None:
    for first_goes in (True, False):
        store = ResponseStore(10**6)
        first, second = (store.add(b"a", name, [], ["msg"], [b"x"]) for name in ("1", "2"))
        goes, stays = (first, second) if first_goes else (second, first)
        store.remove(goes)
        assert store.items(b"a", ["msg"]) == {"msg": b"x"}
        store.remove(stays)
        assert (store.size, len(store)) == (0, 0)
